"""Steps that accumulate, average, call backward or update otherwise."""

from __future__ import annotations

from strategies.step.backward import Accumulate, Backward, Caller
from strategies.step.ema import Average, Ema
from strategies.step.optimizer_in_backward import InBackward, OptimizerInBackward
from tests.made.stubs.parts import Table, nothing


class Hoarding(InBackward):
    """Steps in backward and keeps every gradient."""

    def _follow(self, gradient):
        super()._follow(gradient)
        self.kept = [*getattr(self, "kept", []), gradient]


def hoard(self, trained):
    return Hoarding(trained)


class AsUsual(Caller):
    """Counts its calls, and calls backward as everyone does."""

    def __call__(self, loss, **kwargs):
        self.calls += 1
        self.usual(loss, **kwargs)


class Half(Caller):
    """Keeps the gradients of half the parameters."""

    def _autograd_grad(self, loss):
        self.parameters = self.parameters[::2]
        super()._autograd_grad(loss)


def call_by(kind):
    def configure(self, accelerator, module, launch):
        parameters = [p for p in module.parameters() if p.requires_grad]
        accelerator.backward = kind(accelerator, parameters, self.call)

    return configure


class Lazy(Average):
    """Never averages."""

    def after_step(self):
        pass


class Counting(Average):
    """Counts its updates and makes none."""

    def after_step(self):
        self.updates += 1


class Copying(Average):
    """Copies the weights instead of averaging them."""

    def after_step(self):
        super().after_step()
        for shard, (_, master) in zip(self.shards, self._masters(), strict=True):
            shard.copy_(master.detach())


def attach(kind=Average, decay=None, place="device"):
    def attached(self, trained):
        return kind(trained, trained.settings.ema_decay if decay is None else decay, place)

    return attached


LOST: Table = {
    "steps after backward": (
        "single+optimizer_in_backward", OptimizerInBackward, "attach", nothing,
    ),
    "gradients kept": ("single+optimizer_in_backward", OptimizerInBackward, "attach", hoard),
    "backward as usual": ("single+backward", Backward, "configure", nothing),
    "the graph freed": ("single+backward", Backward, "configure", call_by(AsUsual)),
    "gradients accumulated": (
        "single+backward:call=autograd_grad", Backward, "configure", call_by(AsUsual),
    ),
    "half the gradients": (
        "single+backward:call=autograd_grad", Backward, "configure", call_by(Half),
    ),
    "no accumulation": ("single+accumulate", Accumulate, "accelerator_kwargs", lambda *_: {}),
    "half the accumulation": (
        "single+accumulate:steps=4",
        Accumulate,
        "accelerator_kwargs",
        lambda *_: {"gradient_accumulation_steps": 2},
    ),
    "no average": ("single", Ema, "attach", nothing),
    "an average nobody asked for": ("single+ema:place=none", Ema, "attach", attach()),
    "an average that never steps": ("single", Ema, "attach", attach(Lazy)),
    "an average that only counts": ("single", Ema, "attach", attach(Counting)),
    "a copy, not an average": ("single", Ema, "attach", attach(Copying)),
    "another decay": ("single", Ema, "attach", attach(decay=0.5)),
}  # fmt: skip
