"""A rank that records in which order it gathers layers and computes them."""

from typing import Any

from torch import nn

from tinsmith_fsdp.base_model import BaseModel
from tinsmith_fsdp.program import Loaded, Setup
from tinsmith_fsdp.rank import Rank


class RecordingRank(Rank):
    """The events of the pass: `gather` of the next in turn, `forward` and `backward` of a layer by its number."""

    def load(self, setup: Setup) -> Loaded:
        loaded = super().load(setup)
        self._events: list[str] = []
        base: BaseModel = self._trainer.base  # type: ignore[union-attr]
        assert base.shortage is not None
        base.shortage.gathers = _Told(base.shortage.gathers, self._events)  # type: ignore[assignment]
        for module in base.shortage.modules:
            module.set_custom_all_gather(base.shortage.gathers)  # type: ignore[arg-type]
        for number, layer in enumerate(base.model.layers):
            layer.get_submodule("inner.self_attn.q_proj").register_forward_hook(self._recorder(number))
        return loaded

    def _recorder(self, number: int) -> Any:
        def computed(module: nn.Module, args: Any, output: Any) -> None:
            self._events.append(f"forward {number}")
            if output.requires_grad:
                output.register_hook(lambda _: self._events.append(f"backward {number}"))

        return computed

    def events(self) -> list[str]:
        found = list(self._events)
        self._events.clear()
        return found


class _Told:
    """Gathers, and says so."""

    def __init__(self, gathers: Any, events: list[str]) -> None:
        self._gathers, self._events = gathers, events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gathers, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._events.append("gather")
        return self._gathers(*args, **kwargs)
