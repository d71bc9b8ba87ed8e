"""Where the parts of a model that people add to are found: name -> "module:object".

A new injection, readout or prior is one file and one line here; the name is then a choice in the configuration. The
modules are imported when a model is built, not when a configuration is read.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

INJECTIONS = {
    "none": "",
    "add": "loopscale.model.injection:AddInjection",
    "huginn_linear": "loopscale.model.injection:LinearInjection",
    "diagonal": "loopscale.model.injection:DiagonalInjection",
    "parcae": "loopscale.model.injection:ParcaeInjection",
    "ortho": "loopscale.model.injection:OrthoInjection",
}

READOUTS = {
    "rmsnorm": "loopscale.model.readout:NormReadout",
    "raw": "loopscale.model.readout:RawReadout",
    "final_only": "loopscale.model.readout:FinalOnlyReadout",
    "alpha": "loopscale.model.readout:AlphaReadout",
}


def find(place: str) -> Any:
    """The object at "module:object"."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
