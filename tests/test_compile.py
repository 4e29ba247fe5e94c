"""torch.compile around the step, before or after DDP: split at the buckets, equal to eager, the same checkpoint names."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from run_ranks import run_ranks
from samestep.callbacks import ModelCheckpoint
from samestep.strategies import DDPStrategy
from samestep.trainer import Task
from tasks import Regression, loader, parameters_of, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

ORDERS = ["before_ddp", "after_ddp"]


class Wide(Task):
    """A plain nn.Sequential of 4 layers of 1 MiB: several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch).pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("constant", 3)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train_wide(order: str, folder: str = "") -> dict[str, Any]:
    torch.manual_seed(0)
    strategy = DDPStrategy(
        bucket_cap_mb=1, compile=order, compile_options=None if order == "off" else {"backend": "aot_eager"}
    )
    task = Wide()
    graphs: list[int] = []

    class Count(ModelCheckpoint):
        def on_train_end(self, trainer: Any, task: Any) -> None:
            graphs.append(strategy.graphs)

    trainer = quiet_trainer(
        max_epochs=1, strategy=strategy, callbacks=[Count(folder)], enable_checkpointing=True, log_every_n_steps=1,
        default_root_dir=folder,
    )  # fmt: skip
    inputs = torch.randn(16, 512, generator=torch.Generator().manual_seed(1))
    trainer.fit(task, DataLoader(inputs, 2))
    return {
        "parameters": parameters_of(task),
        "graphs": graphs[0],
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "names": list(task.state_dict()),
    }


@pytest.mark.parametrize("order", ORDERS)
def test_a_compiled_run_is_the_eager_one_with_a_graph_for_each_bucket(order: str, tmp_path: Any) -> None:
    eager, _ = run_ranks(train_wide, 2, "off", str(tmp_path / "eager"))
    compiled, other = run_ranks(train_wide, 2, order, str(tmp_path / "compiled"), timeout=120)
    torch.testing.assert_close(compiled["parameters"], eager["parameters"], rtol=1e-6, atol=1e-7)
    assert torch.equal(compiled["parameters"], other["parameters"])
    assert compiled["graphs"] == 4
    assert compiled["names"] == eager["names"]
    assert compiled["metrics"] == pytest.approx(eager["metrics"], rel=1e-6)
    assert {"loss_step", "loss_epoch", "constant"} <= compiled["metrics"].keys()
    again = Wide.load_from_checkpoint(next((tmp_path / "compiled").glob("step-*")))
    assert torch.equal(parameters_of(again), compiled["parameters"])


class Logs(Regression):
    """Logs a torchmetrics object, too."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.mean.update(loss.detach())
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        self.log("value", loss, on_step=False, on_epoch=True)
        return loss


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch's compiler, at the graph break of a metric
@pytest.mark.parametrize("order", ORDERS)
def test_a_compiled_step_may_log_everything(order: str) -> None:
    trainer = quiet_trainer(
        max_epochs=2, precision=64, strategy=DDPStrategy(compile=order, compile_options={"backend": "eager"})
    )
    trainer.fit(Logs(), loader(16, 4))
    metrics = trainer.callback_metrics
    assert metrics["metric"].item() == pytest.approx(metrics["value"].item(), rel=1e-6)


def test_values_are_logged_without_breaking_the_graph() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trainer = quiet_trainer(
        max_epochs=1, precision=64, log_every_n_steps=1,
        strategy=DDPStrategy(compile="before_ddp", compile_options={"backend": "eager", "fullgraph": True}),
    )  # fmt: skip
    trainer.fit(Regression(), loader(16, 4))
    assert not torch._dynamo.utils.counters["graph_break"]
    assert "train/loss" in trainer.logged_metrics


def test_many_compiled_fits_in_one_process_stay_compiled() -> None:
    """Trap: torch compiles the same code no more after eight wrappers, and goes on eagerly."""
    for _ in range(10):
        strategy = DDPStrategy(compile="before_ddp", compile_options={"backend": "eager"})
        graphs: list[int] = []

        class Looks(Regression):
            def on_train_end(self, graphs: Any = graphs, strategy: Any = strategy) -> None:
                graphs.append(strategy.graphs)

        quiet_trainer(max_epochs=1, precision=64, strategy=strategy).fit(Looks(), loader(8, 4))
        assert graphs == [1]


def test_the_graphs_are_said_and_those_that_come_later(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = DDPStrategy(compile="before_ddp", compile_options={"backend": "eager"})
    quiet_trainer(max_epochs=1, precision=64, strategy=strategy).fit(Regression(), loader(10, 4))
    said = capsys.readouterr().err
    assert "compile: 1 graph for 1 bucket, reductions overlap the backward" in said
    assert "compile: 1 more, for inputs that the 1 before did not fit" in said  # the last batch is shorter


def test_what_can_not_be_compiled_is_refused() -> None:
    with pytest.raises(ValueError, match="compile='after': expected one of 'off', 'before_ddp', 'after_ddp'"):
        DDPStrategy(compile="after")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="compile_options without compile"):
        DDPStrategy(compile_options={"mode": "default"})
    for options, message in (
        ({"backnd": "eager"}, "torch.compile takes no 'backnd': did you mean 'backend'?"),
        ({"disable": True}, "torch.compile takes no 'disable'"),
        ({"backend": 3}, "backend=3: expected a name, or a function"),
        ({"backend": "eager", "mode": "max-autotune"}, "mode is the inductor's; the backend 'eager' takes none"),
        ({"mode": "max-autotune", "options": {"trace.enabled": True}}, "expected mode or options, not both"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            DDPStrategy(compile="before_ddp", compile_options=options)
    with pytest.raises(
        TypeError, match=re.escape("let the strategy compile its step, Trainer(strategy=DDPStrategy(comp")
    ):
        quiet_trainer(max_epochs=1).fit(torch.compile(Regression(), backend="eager"), loader(8, 4))  # pyright: ignore
    for small in ({"bucket_cap_mb": 0.5}, {"bucket_cap_mb_list": [0.1, 0.2]}):
        with pytest.raises(ValueError, match=r"compile and buckets of 0.. MiB at most can't go together"):
            DDPStrategy(compile="before_ddp", **small)

    class Manual(Regression):
        automatic_optimization = False

    with pytest.raises(ValueError, match="compile and automatic_optimization=False"):
        quiet_trainer(strategy=DDPStrategy(compile="before_ddp")).fit(Manual(), loader(8, 4))
    strategy = DDPStrategy(compile="before_ddp", compile_options={"backend": "no such"})
    with pytest.raises(ValueError, match="backend='no such'"):
        quiet_trainer(max_epochs=1, precision=64, strategy=strategy).fit(Regression(), loader(8, 4))


@pytest.mark.parametrize("mode", ["python_reducer", "python_reducer_without_compiled_forward"])
def test_the_python_reducer_is_refused(mode: str) -> None:
    """Trap: with it, buffers are not broadcast, silently."""
    with torch._dynamo.config.patch(optimize_ddp=mode), pytest.raises(ValueError, match=f"optimize_ddp='{mode}'"):
        quiet_trainer(max_epochs=1, strategy=DDPStrategy()).fit(Regression(), loader(8, 4))
