"""Off-policy value: the earnings that a policy would have had, estimated from another policy's log."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"measure": ["value"], "estimators": ["OffPolicyOptions"], "results": ["OffPolicyResult"]}
)
