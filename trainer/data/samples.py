"""Random numbers that belong to a sample, whoever reads it: `Trainer(per_sample_seed=True)`."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from ..randomness import derived_seed, sample_rng


class SeededSamples(Dataset[Any]):
    """A dataset in which what `dataset[index]` draws is a function of (seed, epoch, index).

    So a sample is the same on any rank and in any worker, and when a run is resumed. Python's, numpy's and torch's
    generators (of the CPU) are seeded for each sample, and left as they were: what a training step draws does not change.

    An index is a pair `(epoch, index)`, made by `WithEpoch`: workers that outlive an epoch learn the next one with each
    index. A dataset with `__getitems__` is asked for one sample at a time: in a batch, what one sample draws would
    depend on those before it.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self._batched = callable(getattr(dataset, "__getitems__", None))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, Any]) -> Any:
        epoch, index = key
        with sample_rng(derived_seed(self.seed, epoch, index, "sample")):
            return self.dataset.__getitems__([index])[0] if self._batched else self.dataset[index]
