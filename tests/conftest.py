"""Eight devices out of one CPU, and programs that compile fast rather than run fast.

The flags hold for this process alone: they are read when the first device is touched, which is here, and
what a test starts as a process of its own sees one device, as a user does.
"""

import os

import jax

FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
before = os.environ.get("XLA_FLAGS")
os.environ["XLA_FLAGS"] = " ".join([before or "", *FLAGS]).strip()
assert len(jax.devices()) == 8
if before is None:
    del os.environ["XLA_FLAGS"]
else:
    os.environ["XLA_FLAGS"] = before
