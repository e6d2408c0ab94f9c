"""The training data as a pure function of (step, index), the same on every host."""

from typing import TYPE_CHECKING

from resilient_jax.lazy_names import make_lazy_names

if TYPE_CHECKING:
    from resilient_jax.data.microbatches import MicrobatchData as MicrobatchData
    from resilient_jax.data.microbatches import make_microbatch_data as make_microbatch_data
    from resilient_jax.data.packing import PackedDocuments as PackedDocuments
    from resilient_jax.data.prefetcher import Prefetcher as Prefetcher

__getattr__, __dir__, __all__ = make_lazy_names(__name__)
