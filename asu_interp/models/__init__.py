"""A model to look into: a Hugging Face decoder under TransformerLens hook points."""

from asu_interp.models.health import Check
from asu_interp.models.model import Model, load_model
from asu_interp.models.seams import Seam
from asu_interp.models.template import Template

__all__ = ["Check", "Model", "Seam", "Template", "load_model"]
