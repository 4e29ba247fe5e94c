"""`DataModule`: where the data of a run comes from, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .data.transfer import move_to_device
from .hyperparameters import HyperparametersMixin

if TYPE_CHECKING:
    import torch

    from .trainer import Trainer


class DataModule(HyperparametersMixin):
    """Gives the loaders of a run. Override what you need; all names are Lightning's.

    `prepare_data` runs once per host (download, unpack), before `setup`, which runs on every rank.
    """

    trainer: Trainer | None = None
    """The trainer of the current run; set by it, read-only for you."""

    def prepare_data(self) -> None:
        """Download and unpack: on the first rank of each host, while the others wait. Set no attributes here."""

    def setup(self, stage: str) -> None:
        """Make datasets, on every rank. `stage`: `fit`, `validate`, `test` or `predict`."""

    def teardown(self, stage: str) -> None:
        """Let go of what `setup` made."""

    def train_dataloader(self) -> Any:
        """The training loader."""
        return None

    def val_dataloader(self) -> Any:
        """The validation loader, or a list of them."""
        return None

    def test_dataloader(self) -> Any:
        """The test loader, or a list of them."""
        return None

    def predict_dataloader(self) -> Any:
        """The prediction loader, or a list of them."""
        return None

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the CPU, before it goes to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Bring a batch to the device."""
        return move_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the device."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; plain types and tensors only."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""

    def on_exception(self, exception: BaseException) -> None:
        """The run fails with this exception, on this rank."""
