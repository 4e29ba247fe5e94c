"""Programs that Lightning users write run with other import lines, on one rank and on two."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ported import autoencoder, classifier, gan
from run_ranks import run_ranks
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

OPTIONS = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


def run(main: Callable[..., Any], ranks: int, *args: Any, **options: Any) -> list[Any]:
    """What the program's `main` returns on each rank."""
    options = {**OPTIONS, **options}
    return [main(options, *args)] if ranks == 1 else run_ranks(main, ranks, options, *args)


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), f"{name} differs in some bit"


# --- the autoencoder -----------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_autoencoder_trains(ranks: int) -> None:
    results = run(autoencoder.main, ranks)
    for result in results:
        assert result["epochs"] == 8
        assert result["steps"] == 8 * 512 / (16 * ranks)
        for losses in (result["train_losses"], result["val_losses"]):
            assert len(losses) == 8
            assert losses[-1] < 0.25 * losses[0]
            assert losses == results[0][(losses is result["val_losses"] and "val_losses") or "train_losses"]
        assert result["test_loss"] < 0.02
        assert_equal(result["weights"], results[0]["weights"])
    assert [len(result["codes"]) for result in results] == [100] * ranks  # every sample predicted once, known to all

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert len(list(Path(results[0]["log_dir"]).iterdir())) == 1
    events = EventAccumulator(results[0]["log_dir"]).Reload()
    assert events.Tags()["images"] == ["reconstructions"]
    assert events.Tags()["histograms"] == ["encoder"]
    assert {"train_loss_step", "train_loss_epoch", "val_loss_epoch", "encoder_gradient"} <= set(
        events.Tags()["scalars"]
    )


def test_autoencoder_equals_a_plain_loop() -> None:
    result = run(autoencoder.main, 1, precision="64-true")[0]

    torch.manual_seed(1234)
    encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))
    decoder = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 64))
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder}).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        total = 0.0
        for images, _ in DataLoader(autoencoder.make_images(512, seed=1), batch_size=16):
            x = images.double().flatten(1)
            loss = nn.functional.mse_loss(decoder(encoder(x)), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        losses.append(total / 512)

    expected = model.state_dict()
    assert expected.keys() == result["weights"].keys()
    for name, value in result["weights"].items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)
    assert result["train_losses"] == pytest.approx(losses, rel=0, abs=1e-12)


def test_fast_dev_run_keeps_a_logger_that_does_nothing(tmp_path: Path) -> None:
    result = run(autoencoder.main, 1, fast_dev_run=True)[0]
    assert result["steps"] == 1
    assert not list(tmp_path.rglob("events.*"))


# --- the GAN -------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_gan_trains_both_networks(ranks: int) -> None:
    results = run(gan.main, ranks)
    batches = 10 * 256 // (16 * ranks)
    for result in results:
        untrained, trained = result["distances"]
        assert trained < 0.4 * untrained
        assert result["epochs"] == 10
        assert result["optimizer_steps"] == 2 * batches
        assert result["lr"] == pytest.approx(0.002 * 0.95**10)  # stepped at each epoch's last batch
        assert len(result["g_losses"]) == batches
        assert min(result["d_losses"]) < 0.8 * result["d_losses"][0]
        assert {"g_loss", "d_loss", "d_loss_real", "d_loss_fake"} <= result["metrics"].keys()
        assert all(map(math.isfinite, result["metrics"].values()))
        assert {name.split(".")[0] for name in result["after"]} == {"generator", "discriminator"}
        for name, value in result["after"].items():
            assert not torch.equal(value, result["before"][name]), f"{name} has not moved"
        assert_equal(result["before"], results[0]["before"])
        assert_equal(result["after"], results[0]["after"])
        assert result["metrics"] == results[0]["metrics"]
    if ranks == 2:
        assert results[0]["g_losses"] != results[1]["g_losses"]  # each saw noise and images of its own


# --- the classifier ------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("schedule", ["plateau", "onecycle"])
def test_classifier_trains_and_is_tested_at_its_best(schedule: str, ranks: int) -> None:
    results = run(classifier.main, ranks, schedule)
    per_epoch = 320 // (16 * ranks)
    for result in results:
        assert result["estimated_steps"] == 8 * per_epoch
        assert result["steps"] == result["batches"] == len(result["epochs"]) * per_epoch
        (first_loss, _), (last_loss, last_accuracy) = result["epochs"][0], result["epochs"][-1]
        assert last_loss < 0.3 * first_loss
        assert last_accuracy > 0.9
        assert result["rates"] == pytest.approx(expected_rates(schedule, result, per_epoch), rel=1e-12)

        # The best checkpoint, and not the last one, was tested, is found by its path, and holds its arguments.
        accuracies = [accuracy for _, accuracy in result["validations"]]
        assert result["best_score"] == max(accuracies)
        assert f"val_acc={max(accuracies):.3f}" in result["best_path"]
        assert_equal(result["tested_weights"], result["best_weights"])
        assert not torch.equal(result["best_weights"]["layers.0.weight"], result["last_weights"]["layers.0.weight"])
        assert result["hparams"] == {"hidden": 32, "lr": 0.05, "schedule": schedule}
        assert result["test"] == pytest.approx(plain_test(result["best_weights"]), rel=1e-6)

        for name in ("epochs", "validations", "rates", "best_path", "wait_count"):
            assert result[name] == results[0][name]
        assert_equal(result["last_weights"], results[0]["last_weights"])


def expected_rates(schedule: str, result: dict[str, Any], per_epoch: int) -> list[float]:
    """The learning rate after each step, from torch's schedulers alone."""
    optimizer = torch.optim.SGD([torch.zeros(())], lr=0.05, momentum=0.9)
    rates = []
    if schedule == "onecycle":
        one_cycle = OneCycleLR(optimizer, max_lr=0.05, total_steps=8 * per_epoch)
        for _ in result["rates"]:
            optimizer.step()
            one_cycle.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates
    plateau = ReduceLROnPlateau(optimizer, mode="min", factor=0.5, patience=0, threshold=0.05)
    for loss, _ in result["validations"]:
        rates += [optimizer.param_groups[0]["lr"]] * per_epoch
        plateau.step(loss)
    assert len(set(rates)) > 1
    return rates


def plain_test(weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """Loss and accuracy over the test set, each of its 103 samples once."""
    dm = classifier.ClustersDataModule()
    dm.setup("test")
    x, y = next(iter(DataLoader(dm.test_set, batch_size=len(dm.test_set))))
    assert len(y) == 103
    layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Identity(), nn.Linear(32, 4))
    layers.load_state_dict({name.removeprefix("layers."): value for name, value in weights.items()})
    with torch.no_grad():
        logits = layers(x)
    accuracy = (logits.argmax(1) == y).double().mean().item()
    return {"test_loss": nn.functional.cross_entropy(logits, y).item(), "test_acc": accuracy}
