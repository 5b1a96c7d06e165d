"""See the package."""

from mindio_ttp.framework_ttp import __getattr__ as __getattr__
