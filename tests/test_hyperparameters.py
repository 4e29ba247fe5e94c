"""`save_hyperparameters` where classes inherit: the subclass has the last word on what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samestep.trainer import DataModule
from tasks import ScalarWeight, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader


class Base(ScalarWeight):
    def __init__(self, size: int = 1, **more: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.size_at_once = self.hparams.size


class IgnoresAfter(Base):
    def __init__(self, net: Any, size: int = 2, secret: str = "s") -> None:
        super().__init__(size)
        self.save_hyperparameters(ignore=["net", "secret"])


class IgnoresBefore(Base):
    def __init__(self, net: Any, size: int = 2, secret: str = "s") -> None:
        self.save_hyperparameters(ignore=["net", "secret"])
        super().__init__(size)


class HandsOn(Base):
    def __init__(self, net: Any, size: int = 2) -> None:
        super().__init__(size, net=net)
        self.save_hyperparameters(ignore="net")


class OfTheMiddle(IgnoresAfter):
    def __init__(self, net: Any, depth: int = 3) -> None:
        super().__init__(net)


@pytest.mark.parametrize("kind", [IgnoresAfter, IgnoresBefore, HandsOn])
def test_what_a_subclass_ignores_does_not_come_back(kind: Any) -> None:
    task = kind(nn.Linear(1, 1))
    assert task.hparams == {"size": 2}
    assert task.size_at_once == 2
    quiet_trainer(max_epochs=1).fit(task, DataLoader(torch.ones(2), 1))


def test_a_class_in_the_middle_ignores_for_those_below_it() -> None:
    assert OfTheMiddle(nn.Linear(1, 1)).hparams == {"size": 2, "depth": 3}


def test_what_a_parent_ignores_a_subclass_may_keep() -> None:
    class Parent(ScalarWeight):
        def __init__(self, a: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters(ignore="a")

    class Child(Parent):
        def __init__(self, a: int = 2, b: int = 3) -> None:
            super().__init__(a)
            self.save_hyperparameters()

    assert Parent().hparams == {}
    assert Child().hparams == {"a": 2, "b": 3}


def test_what_could_not_be_kept_and_is_not_ignored_is_refused_when_a_run_starts() -> None:
    class Child(Base):
        def __init__(self, net: Any) -> None:
            super().__init__()

    class Data(DataModule):
        def __init__(self, path: Any) -> None:
            self.save_hyperparameters()

    with pytest.raises(TypeError, match="Base's argument 'net' is a Linear"):
        Base(net=nn.Linear(1, 1))
    with pytest.raises(TypeError, match="Data's argument 'path' is a object"):
        Data(object())
    task = Child(nn.Linear(1, 1))
    assert task.hparams == {"size": 1}
    with pytest.raises(TypeError, match=r"Child's argument 'net' is a Linear.*save_hyperparameters\(ignore=\[…\]\)"):
        quiet_trainer(max_epochs=1).fit(task, DataLoader(torch.ones(2), 1))
