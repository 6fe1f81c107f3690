"""A device that is not the CPU and computes all the same, so that what follows training can be compared with the CPU.

Its tensors have values, which lie on the CPU. An operation on tensors of both devices fails as it would on a GPU; only
an explicit transfer (``.to``, ``.cpu``, ``.item``, ``.tolist``, a branch) crosses. ``transfers`` counts those to the
CPU, for each of which a GPU would be waited for. PyTorch cannot forget a device that was added to it: use it in a
process of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

DEVICE = "gpu"
#: Operations that may read tensors of both devices: transfers, and indices, which PyTorch moves itself.
CROSSING = {"_to_copy", "copy_", "index", "index_put", "index_put_", "_index_put_impl_"}


class OnDevice(Tensor):
    """A tensor of the device; ``values`` lie on the CPU."""

    @staticmethod
    def __new__(cls, values):
        made = Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype,
            device=torch.device(DEVICE), requires_grad=False,
        )  # fmt: skip
        made.values = values
        return made

    def __repr__(self):
        return f"OnDevice({self.values!r})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})


class Device(TorchDispatchMode):
    """While it is entered, factories make tensors on the device.

    Attributes:
        transfers: number of transfers from the device to the CPU.
    """

    transfers = 0

    def __enter__(self):
        self._tensor, self._new_tensor, self._inference = torch.tensor, Tensor.new_tensor, torch.inference_mode
        torch.tensor = self._made
        Tensor.new_tensor = lambda tensor, data, **more: self._made_like(tensor, data, **more)
        torch.inference_mode = torch.no_grad  # its tensors cannot be views of a subclass
        Device.transfers = 0
        return super().__enter__()

    def __exit__(self, *error):
        torch.tensor, Tensor.new_tensor, torch.inference_mode = self._tensor, self._new_tensor, self._inference
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})

    def _made(self, data, *, dtype=None, device=None, **more):
        made = self._tensor(data, dtype=dtype, **more)
        return made if device is None or torch.device(device).type != DEVICE else OnDevice(made)

    def _made_like(self, tensor, data, **more):
        made = self._tensor(data, dtype=more.get("dtype", tensor.dtype))
        return OnDevice(made) if isinstance(tensor, OnDevice) else made


def computed(function, args, kwargs):
    """The result of an operation, on the device that it belongs to."""
    name = function.overloadpacket.__name__
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    here = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
    there = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim()]
    assert not here or not there or name in CROSSING, f"{name} mixes devices"
    asked = kwargs.get("device")
    on_device = bool(here) if asked is None else torch.device(asked).type == DEVICE
    if name in ("copy_", "set_"):
        on_device = isinstance(args[0], OnDevice)
    if here and (name == "_local_scalar_dense" or not on_device):
        Device.transfers += 1
    values = {id(tensor): tensor.values for tensor in here}
    plain_args, plain = tree_map(lambda leaf: values.get(id(leaf), leaf), (args, kwargs))
    if asked is not None:
        plain["device"] = torch.device("cpu")
        plain.pop("pin_memory", None)
    found = function(*plain_args, **plain)
    if name == "_local_scalar_dense" or not on_device:
        return found
    changed = {id(tensor.values): tensor for tensor in here}  # what an operation changes in place stays itself

    def wrapped(leaf):
        return changed.get(id(leaf), OnDevice(leaf)) if isinstance(leaf, Tensor) else leaf

    return tree_map(wrapped, found)


def register():
    """Adds the device to PyTorch, for the rest of the process."""
    _setup_privateuseone_for_python_backend(rename=DEVICE)
    torch.gpu.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]


def moved(module):
    """Moves a module to the device in place; shared parameters stay shared."""
    made = {}
    for part in module.modules():
        for name, weight in list(part._parameters.items()):
            if weight is not None:
                if id(weight) not in made:
                    made[id(weight)] = nn.Parameter(OnDevice(weight.detach().clone()), weight.requires_grad)
                part._parameters[name] = made[id(weight)]
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = OnDevice(buffer.clone())
    return module
