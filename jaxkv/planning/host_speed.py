"""Estimate of the speed of this machine's CPU: the work of a request, divided by rates measured just now."""

import jax.numpy as jnp

from jaxkv.engine.lengths import bucket
from jaxkv.planning.host_rates import host_rates
from jaxkv.planning.setting import HostSetting
from jaxkv.planning.speed import Speed
from jaxkv.planning.work import prefill_work, rows_read, step_scores, weights_read

# Reading keys a second time, for the attention that rows receive, is half of reading keys and values.
_KEYS_AGAIN = 0.5


def host_estimate(setting: HostSetting, weights: int) -> Speed | None:
    """Estimated `Speed` (decode and prefill seconds, tokens/s) of a request on this CPU; None if rows are offloaded.

    `weights` is the bytes of the parameters. The first call in a process measures the machine for some seconds.
    """
    parts, config, item = setting.policy.parts(), setting.config, jnp.dtype(setting.dtype).itemsize
    reading = parts.reading(config.windows, bucket(setting.context))
    if reading is not None and reading.offloaded:
        return None
    rates = host_rates(config, setting.dtype, setting.batch)
    read, used = weights_read(setting, weights)
    product = max(read / rates.weights, 2 * used / item * setting.batch / rates.products)
    held, filters = rows_read(setting)
    row = config.head_dim * item * config.kv_heads * setting.batch
    rows = 2 * row * float(held.sum())
    if filters:
        # A filter layer reads its keys once more to score them.
        rows += row * float(held[list(filters)].sum())
    if parts.ongoing is not None and parts.ongoing.attends:
        rows *= 1 + _KEYS_AGAIN
    work, scores = prefill_work(setting, weights), step_scores(setting) / rates.sums
    prefill = (
        work.products / rates.products + work.attention / rates.attention + work.scores / rates.sums
    )
    step = product + rows / rates.rows + scores
    products, attention, weighed, attended = (
        f"{each / 1e9:,.1f}"
        for each in (rates.products, rates.attention, rates.weights, rates.rows)
    )
    return Speed(
        step=step,
        tokens=setting.batch / step,
        prefill=prefill,
        weights=product,
        rows=rows / rates.rows,
        launches=0.0,
        sent=0.0,
        scores=scores,
        rates={
            "prefill_products_flops": rates.products,
            "prefill_attention_flops": rates.attention,
            "scores_flops": rates.sums,
            "decode_weights_bytes_per_second": rates.weights,
            "decode_rows_bytes_per_second": rates.rows,
        },
        assumed=f"prefill's matrix products at {products} and its attention at {attention} GFLOP/s, decode's reads of "
        f"weights at {weighed} and of rows at {attended} GB/s: measured in this process, under the load then",
    )
