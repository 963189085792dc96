"""Backend for TPUs: XLA's operations, without the forms that exist for CPUs."""

from jaxkv.attention.backend import Setting
from jaxkv.attention.xla_backend import Xla


class Tpu(Xla):
    """Backend for TPUs in XLA's operations, without a CPU's forms."""

    cpu_forms = False

    def refusal(self, setting: Setting) -> str | None:
        """Error text for devices other than TPUs; None on TPUs."""
        return None if setting.platform == "tpu" else f"it needs a TPU, this is {setting.platform}: use auto or xla"


class Interpreted(Tpu):
    """Backend for TPUs run on any device, for tests."""

    def refusal(self, setting: Setting) -> str | None:
        """Always None, which means no error: these operations run on every device."""
        return None

    def suits(self, setting: Setting) -> bool:
        """Always False: AUTO never chooses it."""
        return False
