"""The layers of a model as torch.compile makes them, for passes of one token that become graphs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch

from .._errors import Unsupported
from ._cache import STATE_CALLS

# What a token costs beside attention are matrices times one vector: this has Inductor write kernels for them, try their shapes, and put
# those that need not wait for each other into one launch (8B in bf16 behind 131,072 tokens on an H100: 8.1 ms a token, with the first
# alone 8.7, with none 9.2, not compiled 10.8).
OPTIONS = {"coordinate_descent_tuning": True, "combo_kernels": True}
# Of a kind of layers a few are made: of each type, and once more for what differs between layers of a type.
LIMIT = 64


class Compiled:
    """Each layer of a decoder, compiled by itself: layers that are alike share what is made. Attention stays a call of its own."""

    def __init__(self, decoder: torch.nn.Module, options: Optional[dict[str, Any]] = None, backend: Any = "inductor") -> None:
        lists = [child for child in decoder.children() if isinstance(child, torch.nn.ModuleList)]
        self._modules = [module for layers in lists for layer in layers for module in _parts(layer)]
        if not self._modules:
            raise Unsupported(f"compile=True: {type(decoder).__name__} has no list of layers")
        given = {"backend": backend} if backend != "inductor" else {"options": OPTIONS if options is None else options}
        self._made = [torch.compile(module.forward, **given) for module in self._modules]
        self.count = 0  # of graphs that were compiled here

    @contextmanager
    def layers(self) -> Iterator[None]:
        """Meanwhile the model runs its compiled layers. What another pass before has not made yet is made: that takes seconds."""
        # Layers differ by their numbers, which would be compiled into each.
        config = {"allow_unspec_int_on_nn_module": True, "recompile_limit": max(LIMIT, torch._dynamo.config.recompile_limit)}
        before, graphs = [vars(module).get("forward") for module in self._modules], _graphs()
        for module, made in zip(self._modules, self._made):
            module.forward = made  # type: ignore[method-assign]
        try:
            with torch._dynamo.config.patch(config):
                yield
        finally:
            self.count += _graphs() - graphs
            for module, own in zip(self._modules, before):
                del module.forward
                if own is not None:
                    module.forward = own  # type: ignore[method-assign]


def _parts(layer: torch.nn.Module) -> list[torch.nn.Module]:
    """The layer; of one with a state that it takes from the cache by its own number, rather than by calls, what lies beside that."""

    def is_own(module: torch.nn.Module) -> bool:
        return any(hasattr(one, "layer_idx") and not hasattr(one, "_keyhole") for one in module.modules() if one is not layer)

    return [layer] if "get_conv_state" in STATE_CALLS or not is_own(layer) else [child for child in layer.children() if not is_own(child)]


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
