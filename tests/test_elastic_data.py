"""A run that goes on on another number of ranks, inside an epoch or between two, is the run that was never stopped."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from run_ranks import run_ranks
from samestep.callbacks import Callback
from samestep.trainer import CheckpointError
from samestep.trainer.data.prepared import Place
from simulated_ranks import batches, dealt_back, prepared
from tasks import Regression, numbers, parameters_of, quiet_trainer
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

# --- reading on, on simulated ranks --------------------------------------------------------------


@pytest.mark.parametrize("even", [True, False])
def test_the_rest_of_an_epoch_holds_each_sample_once_on_any_number_of_ranks(even: bool) -> None:
    """Training leaves out the fewer than `ranks` samples at the end of the order that can't be dealt evenly."""
    for length, ranks, size in product((12, 23), (1, 2, 3), (1, 2, 3)):
        order = batches(prepared(DataLoader(range(length), 1, shuffle=True), training=even))
        order = [sample for batch in order for sample in batch]
        for done in range(length):
            rest: list[list[int]] = []
            for rank in range(ranks):
                loader = prepared(DataLoader(range(length), size, shuffle=True), rank, ranks, training=even)
                loader.begin_at(Place(0, 1, done))
                if loader.length == 1:
                    rest.append([])
                    continue
                read = batches(loader, 0, 1)
                assert loader.length == 1 + len(read)
                rest.append([sample for batch in read for sample in batch])
                assert loader.items_done(2) == done + size * ranks
            left = length - done
            assert dealt_back(rest) == order[done : length - left % ranks if even else length], (length, ranks, done)


class Counted(Dataset[int]):
    """Counts what is read of it."""

    reads = 0

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index


class CountedSampler:
    """Counts how many of its indices are drawn."""

    drawn = 0

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Any:
        for index in range(1000):
            self.drawn += 1
            yield index


def test_a_late_place_is_found_with_as_many_reads_as_an_early_one() -> None:
    for done in (0, 1, 4_999_999):
        data = Counted()
        loader = prepared(DataLoader(data, 1), 1, 2)
        loader.set_epoch(0)
        assert next(loader.batches(skip=done)).tolist() == [2 * done + 1]
        assert data.reads == 1
    for done in (0, 1, 400):
        data, sampler = Counted(), CountedSampler()
        loader = prepared(DataLoader(data, 1, sampler=sampler), 1, 2)  # pyright: ignore
        loader.set_epoch(0)
        next(loader.batches(skip=done))
        assert (data.reads, sampler.drawn) == (1, 1000)


# --- through runs --------------------------------------------------------------------------------


class Trained(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Trace(Callback):
    """What every step leaves: its number, its place in the epoch, the rate, the weights; and each validation."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.validations: list[Any] = []

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.steps.append(
            (trainer.global_step, trainer.current_epoch, trainer.progress.batch_idx, rate, parameters_of(task))
        )

    def on_validation_end(self, trainer: Any, task: Any) -> None:
        self.validations.append((trainer.global_step, trainer.callback_metrics["val/loss"].item()))


class Saver(Callback):
    """Saves behind every step, also an epoch's last, and at each epoch's end."""

    def __init__(self, folder: str) -> None:
        self.folder, self.paths, self.ends = folder, list[str](), list[str]()

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        self.paths.append(f"{self.folder}/step-{trainer.global_step}")
        trainer.save_checkpoint(self.paths[-1])

    def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
        self.ends.append(f"{self.folder}/epoch-{trainer.current_epoch}")
        trainer.save_checkpoint(self.ends[-1])


def run(folder: str, ckpt_path: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Train; `options`: the `size` of a rank's batch, the number of `samples`, the `kind` of loader, whether it `saves`."""
    options = {"size": 6, "samples": 36, "kind": "shuffled", "val_check_interval": 3, **options}
    torch.manual_seed(5)
    size, data = options.pop("size"), numbers(options.pop("samples"))
    loader = LOADERS[options.pop("kind")](data, size)
    keep, trace = Saver(folder), Trace()
    saving = [keep] if options.pop("saves", True) else []
    trainer = quiet_trainer(
        max_epochs=2, precision=64, seed=3, callbacks=[*saving, trace], num_sanity_val_steps=0,
        **options,
    )  # fmt: skip
    trainer.fit(Trained(), loader, DataLoader(numbers(9, seed=1), 2), ckpt_path=ckpt_path)
    return {
        "steps": trace.steps,
        "validations": trace.validations,
        "paths": keep.paths,
        "ends": keep.ends,
        "batch": trainer.training_data.batch_size,  # pyright: ignore
        "length": trainer.num_training_batches,
    }


class Rows(IterableDataset[Any]):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter([self.data[index] for index in range(len(self.data))])


LOADERS: dict[str, Any] = {
    "shuffled": lambda data, size: DataLoader(data, size, shuffle=True),
    "torch's batches": lambda data, size: DataLoader(data, batch_sampler=BatchSampler(range(len(data)), size, False)),
    "stream": lambda data, size: DataLoader(Rows(data), size),
    "own batches": lambda data, size: DataLoader(data, batch_sampler=[[at, at + 1] for at in range(0, len(data), 2)]),
    "list": lambda data, size: list(DataLoader(data, size)),
}


def several_runs(jobs: list[tuple[str, str | None, dict[str, Any]]]) -> list[Any]:
    found: list[Any] = []
    for job in jobs:
        try:
            found.append(run(*job))
        except (CheckpointError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def assert_goes_on(resumed: dict[str, Any], whole: dict[str, Any], step: int, *, checked: bool = True) -> None:
    """Behind `step`, and where the checks due there were not `checked` yet, behind these."""
    rest = [entry for entry in whole["steps"] if entry[0] > step]
    assert [entry[:4] for entry in resumed["steps"]] == [entry[:4] for entry in rest]
    for (*_, mine), (*_, theirs) in zip(resumed["steps"], rest, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    checks = [check for check in whole["validations"] if check[0] >= step + checked]
    assert [check[0] for check in resumed["validations"]] == [check[0] for check in checks]
    found = [check[1] for check in resumed["validations"]]
    assert found == pytest.approx([check[1] for check in checks], abs=1e-12)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_any_number_of_ranks_goes_on_from_any_step_as_if_it_had_never_stopped(
    accumulation: int, tmp_path: Path
) -> None:
    options = {"accumulate_grad_batches": accumulation, "samples": 24, "val_check_interval": 2}
    whole = run(str(tmp_path / "whole"), None, options)
    steps = len(whole["steps"])
    assert steps == 8 // accumulation
    parts = {1: whole}
    for ranks in (2, 3):
        job = (str(tmp_path / f"{ranks}"), None, {**options, "size": 6 // ranks})
        parts[ranks] = run_ranks(several_runs, ranks, [job])[0][0]
        assert_goes_on(parts[ranks], whole, 0)
    last = steps // 2
    for ranks in (1, 2, 3):
        stops: list[Any] = []
        for before in {1, 2, 3} - {ranks}:
            # Inside both epochs, behind the last batch of the first, and at its end.
            for stop in (1, last + 1) if ranks == 1 or before == 1 else (last + 1,):
                stops.append((stop, before, parts[before]["paths"][stop - 1], True))
            stops.append((last, before, parts[before]["paths"][last - 1], False))
            stops.append((last, before, parts[before]["ends"][0], True))
        jobs = [
            (str(tmp_path / f"{ranks}-{number}"), path, {**options, "size": 6 // before, "saves": False})
            for number, (_, before, path, _) in enumerate(stops)
        ]
        found = several_runs(jobs) if ranks == 1 else run_ranks(several_runs, ranks, jobs, timeout=100)[0]
        for resumed, (stop, _, path, checked) in zip(found, stops, strict=True):
            assert isinstance(resumed, dict), resumed
            assert resumed["batch"] == 6 // ranks, path
            assert_goes_on(resumed, whole, stop, checked=checked)


class Counting(Regression):
    """Logs what depends on the samples alone, in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.error, self.ranks = (
            torchmetrics.MeanSquaredError().set_dtype(torch.float64),
            torchmetrics.SpearmanCorrCoef(),
        )
        self.correlation = torchmetrics.PearsonCorrCoef().set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        first = x[:, 0]
        for kind in ("mean", "sum", "min", "max"):
            self.log(kind, getattr(first, kind)(), on_step=False, on_epoch=True, reduce_fx=kind)
        self.log("both", first.mean(), on_step=True, on_epoch=True)
        for name in ("error", "ranks", "correlation"):
            metric = getattr(self, name)
            metric.update(first, y.flatten())
            self.log(name, metric, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def count(folder: str, ckpt_path: str | None, size: int) -> tuple[dict[str, float], list[str], str]:
    """What an epoch comes to, where it was saved behind each step, and what was printed."""
    torch.manual_seed(5)
    keep = Saver(folder)
    trainer = quiet_trainer(max_epochs=1, precision=64, seed=3, callbacks=[keep], log_every_n_steps=100)
    printed = StringIO()
    with redirect_stdout(printed):
        trainer.fit(Counting(), DataLoader(numbers(24), size, shuffle=True), ckpt_path=ckpt_path)
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return values, keep.paths, printed.getvalue()


def counts(jobs: list[tuple[str, str | None, int]]) -> list[Any]:
    return [count(*job) for job in jobs]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torchmetrics: of memory, and of too few samples
def test_the_values_of_an_epoch_are_those_of_all_its_batches_on_any_number_of_ranks(tmp_path: Path) -> None:
    parts = {1: count(str(tmp_path / "1"), None, 6)}
    whole = parts[1][0]
    for ranks in (2, 3):
        parts[ranks] = run_ranks(counts, ranks, [(str(tmp_path / f"{ranks}"), None, 6 // ranks)])[0][0]
        assert parts[ranks][0] == pytest.approx(whole, abs=1e-12)
    for ranks in (1, 2, 3):
        others = {1, 2, 3} - {ranks}
        jobs = [
            (str(tmp_path / f"{ranks}-{before}-{stop}"), parts[before][1][stop], 6 // before)
            for before in others
            for stop in (0, 2, 3)  # the last: behind the last batch, in front of the epoch's end
        ]
        found = counts(jobs) if ranks == 1 else run_ranks(counts, ranks, jobs)[0]
        for (values, _, printed), job in zip(found, jobs, strict=True):
            left_out = ranks < 6 // job[2]
            assert ("'correlation'" in printed) == left_out, job
            if left_out:  # what several ranks have of it can't become one
                values.pop("correlation")
            assert values == pytest.approx({name: whole[name] for name in values}, abs=1e-12), job
            assert len(values) == len(whole) - left_out


@pytest.mark.parametrize("kind", ["torch's batches", "stream"])
def test_several_changes_of_the_ranks_in_one_epoch(kind: str, tmp_path: Path) -> None:
    whole = run(str(tmp_path / "whole"), None, {"kind": kind})
    options = {"size": 3, "kind": kind}
    folder = str(tmp_path / "parts")
    path = None
    for ranks, stop in ((2, 1), (3, 2), (1, 4), (2, 5), (3, 8), (1, 12)):
        job = (folder, path, {**options, "max_steps": stop})
        resumed = run_ranks(several_runs, ranks, [job])[0][0]
        assert isinstance(resumed, dict), resumed
        done = stop - len(resumed["steps"])
        seen = {name: [entry for entry in whole[name] if entry[0] <= stop] for name in ("steps", "validations")}
        assert_goes_on(resumed, seen, done)
        path = resumed["paths"][-1]


def test_scale_keeps_the_batch_of_a_rank_and_loses_no_sample(tmp_path: Path) -> None:
    """The batch of all ranks, and with it the number of steps, changes with the number of ranks."""
    whole = run_ranks(several_runs, 2, [(str(tmp_path / "two"), None, {"size": 3})])[0][0]
    jobs = [
        (str(tmp_path / "one"), whole["paths"][1], {"size": 3, "resume_batch": "scale"}),  # 12 of 36 samples done
        (str(tmp_path / "end"), whole["paths"][5], {"size": 3, "resume_batch": "scale"}),
    ]
    one, end = several_runs(jobs)
    places = [(epoch, batch) for _, epoch, batch, *_ in one["steps"]]
    assert places == [(0, batch) for batch in range(5, 13)] + [(1, batch) for batch in range(1, 13)]
    assert one["batch"] == 3
    assert [(epoch, batch) for _, epoch, batch, *_ in end["steps"]] == [(1, batch) for batch in range(1, 13)]
    (three,) = run_ranks(
        several_runs, 3, [(str(tmp_path / "three"), whole["paths"][1], {"size": 3, "resume_batch": "scale"})]
    )[0]
    assert [(epoch, batch) for _, epoch, batch, *_ in three["steps"]][:4] == [(0, 2), (0, 3), (0, 4), (1, 1)]


def test_what_can_not_go_on_is_refused_with_the_numbers(tmp_path: Path) -> None:
    jobs = [
        (str(tmp_path / "two"), None, {"size": 3}),
        (str(tmp_path / "own"), None, {"kind": "own batches"}),
        (str(tmp_path / "list"), None, {"kind": "list", "use_distributed_sampler": False}),
    ]
    two, own, as_it_is = run_ranks(several_runs, 2, jobs)[0]
    messages = [
        ((two["paths"][1], {"size": 4}), r"inside epoch 0 on 2 ranks with batches of 3 samples; 1 rank with batches of 4 samples"),
        ((own["paths"][1], {"kind": "own batches"}), r"would take 1 where it took 2 at once.*resume_batch='scale'"),
        ((as_it_is["paths"][1], {"kind": "list"}), r"the trainer does not deal the samples of this loader"),
        ((two["paths"][1], {"size": 3, "samples": 37}), r"with a training set of 36 samples; here it would go on with a .*37 samples"),
        ((two["paths"][1], {"size": 3, "kind": "torch's batches"}), r"in the order of a shuffle; here .* in the order of"),
        ((two["paths"][1], {"size": 3, "accumulate_grad_batches": 2}), r"with windows of 1 micro-batch; here .* 2 micro-batches"),
    ]  # fmt: skip
    for index, ((path, options), message) in enumerate(messages):
        with pytest.raises(CheckpointError, match=message):
            run(str(tmp_path / f"refused-{index}"), path, options)
    scaled = run(str(tmp_path / "scaled"), own["paths"][1], {"kind": "own batches", "resume_batch": "scale"})
    assert [(epoch, batch) for _, epoch, batch, *_ in scaled["steps"]][:2] == [(0, 5), (0, 6)]
    ended = run(str(tmp_path / "ended"), as_it_is["ends"][-1], {"kind": "list", "val_check_interval": None})
    assert ended["steps"] == []  # both epochs are done: nothing to refuse
    error = run_ranks(several_runs, 4, [(str(tmp_path / "four"), two["paths"][1], {"size": 3})])[0][0]
    assert "a batch of 6 samples (2 × 3), which 4 ranks can't share evenly: expected one of 1, 2, 3, 6 ranks" in error
