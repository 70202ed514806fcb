"""Keyhole under models of Hugging Face transformers.

    from transformers import AutoModelForCausalLM
    import keyhole.transformers

    model = AutoModelForCausalLM.from_pretrained("...")
    keyhole.transformers.enable(model)              # index="auto"; index="ivf", tail="second", error_target=0.05, ...
    model.generate(...)                             # as ever

From then on each sequence's keys and values lie in a keyhole.Session, and attention reads those that matter. help(enable) says
what can be set, and what is refused.
"""

import torch  # noqa: F401  (says what is missing by its own name)

from ._cache import KeyholeCache
from ._enable import Enabled, disable, enable

__all__ = ["Enabled", "KeyholeCache", "disable", "enable"]
