"""Options from the command line: typed, later wins, and what is wrong is named in one line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from samestep.trainer import TrainerConfig, from_command_line
from samestep.trainer.overrides import apply_overrides


@dataclass(frozen=True)
class Options:
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(max_epochs=5))
    rate: float = 0.1
    count: int = 3
    name: str = "x"
    flag: bool = False
    sizes: list[int] = field(default_factory=lambda: [1, 2])


@pytest.mark.parametrize(
    ("argument", "path", "value"),
    [
        ("trainer.max_epochs=3", "trainer.max_epochs", 3),
        ("trainer.max_epochs=null", "trainer.max_epochs", None),
        ("trainer.limit_train_batches=0.5", "trainer.limit_train_batches", 0.5),
        ("trainer.limit_train_batches=2", "trainer.limit_train_batches", 2),
        ("trainer.devices=2", "trainer.devices", 2),
        ("trainer.devices=auto", "trainer.devices", "auto"),
        ("trainer.devices=[0,1]", "trainer.devices", [0, 1]),
        ("trainer.precision=64-true", "trainer.precision", "64-true"),
        ("trainer.max_time=00:12:30:00", "trainer.max_time", "00:12:30:00"),
        ("trainer.deterministic=warn", "trainer.deterministic", "warn"),
        ("trainer.gradient_clip_val=1e-1", "trainer.gradient_clip_val", 0.1),
        ("rate=1e-5", "rate", 1e-5),
        ("rate=10e2", "rate", 1000.0),
        ("rate=2", "rate", 2.0),
        ("count=010", "count", 10),
        ("name=123", "name", "123"),
        ("name=12:30", "name", "12:30"),
        ("name=a=b", "name", "a=b"),
        ("flag=true", "flag", True),
        ("sizes=[4,5,6]", "sizes", [4, 5, 6]),
    ],
)
def test_an_override_is_read_as_the_fields_type(argument: str, path: str, value: Any) -> None:
    options: Any = apply_overrides(Options(), [argument])
    for name in path.split("."):
        options = getattr(options, name)
    assert options == value
    assert type(options) is type(value)


def test_the_last_one_wins_and_the_rest_stays() -> None:
    options = apply_overrides(Options(), ["count=1", "trainer.max_epochs=2", "count=7"])
    assert options == Options(TrainerConfig(max_epochs=2), count=7)
    assert apply_overrides(Options(), []) == Options()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("coutn=1", "'coutn=1': Key 'coutn' not in 'Options'.*'count'"),
        ("trainer.max_epoch=1", "'max_epochs'"),
        ("count", "expected name=value"),
        ("count=", "expected name=value"),
        ("=3", "expected name=value"),
        ("count=1.5", "count=1.5"),
        ("count=three", "count=three"),
        ("rate=fast", "rate=fast"),
        ("flag=maybe", "flag=maybe"),
        ("trainer=5", "trainer=5"),
        ("trainer.max_epochs=-5", "max_epochs=-5: expected a whole number"),
        ("trainer.gradient_clip_algorithm=l2", "l2"),
        ("sizes=[1,", "sizes=.1,"),
    ],
)
def test_a_wrong_override_is_named(
    argument: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        apply_overrides(Options(), [argument])
    assert "\n" not in str(error.value)
    monkeypatch.setattr("sys.argv", ["train.py", argument])
    with pytest.raises(SystemExit) as leaving:
        from_command_line(Options())
    assert leaving.value.code == 2
    assert capsys.readouterr().err.startswith("train.py: ")
