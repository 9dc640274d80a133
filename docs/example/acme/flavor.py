"""A size of an existing family."""

import dataclasses

from torchtitan.models.spec import MODELS

llama3 = MODELS.get("llama3")
llama3.add_flavor("acme-tiny", dataclasses.replace(llama3.flavors["debugmodel"], dim=64, n_layers=2, n_heads=4))
