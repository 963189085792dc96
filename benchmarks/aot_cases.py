"""The kernels that `aot.py` compiles, as functions of abstract arrays, and the shapes they are compiled for."""

from functools import partial

# Stores whose codes kernels read without decoding them first.
STORES = ("int8", "int4", "mixed")


def arguments(case):
    """The kernel as a function, and the shapes it is compiled for."""
    import jax
    import jax.numpy as jnp
    import shapes

    from jaxkv import pallas_kernels

    heads = next(each for each in shapes.MODELS if each.name == case.model)
    k_heads, group, dim, dtype = heads.kv_heads, heads.group, heads.dim, jnp.dtype(case.dtype)
    of, i32 = jax.ShapeDtypeStruct, jnp.int32
    batch, slots, pool = 2, 8192, heads.kv_heads * 2304
    rows, table = of((batch, pool, dim), dtype), of((batch, k_heads), i32)
    whole, one = of((batch, k_heads, slots, dim), dtype), of((batch,), i32)
    queries = of((batch, k_heads, group, slots, dim), dtype)
    match case.kernel:
        case name if name.startswith("decode_token"):
            return token_arguments(
                heads, dtype, batch=batch, pool=pool, kind=name.removeprefix("decode_token")
            )
        case "attend":
            attend = lambda *a: pallas_kernels.attend(*a[:-1], score=a[-1])  # noqa: E731
            score = of((batch, pool), jnp.float32)
            return attend, (
                of((batch, k_heads, group, dim), dtype),
                rows,
                rows,
                table,
                table,
                score,
            )
        case "attend_question":
            return pallas_kernels.attend, (
                of((batch, k_heads, group * 32, dim), dtype),
                rows,
                rows,
                table,
                table,
            )
        case "compact":
            return pallas_kernels.compact, (whole, whole, of((batch, pool), i32))
        case "multiply_codes_8" | "multiply_codes_4":
            return linear_arguments(heads, dtype, bits=int(case.kernel[-1]))
        case "add_norm" | "replace_rows" | "evict_rows":
            return step_arguments(case.kernel, heads, dtype, batch=batch, pool=pool)
        case "flash":
            return pallas_kernels.flash, (queries, whole, whole, one, one)
        case "flash_window":
            return partial(pallas_kernels.flash, window=1024), (queries, whole, whole, one, one)
        case "flash_mosaic":
            from jaxkv.pallas_kernels import mosaic

            return mosaic.flash, (queries, whole, whole, one, one)
        case "column_sums":
            lse = of((batch, k_heads, group, slots), jnp.float32)
            return pallas_kernels.column_sums, (queries, whole, lse, one, one)
        case "window_sums":
            return pallas_kernels.window_sums, (
                of((batch, k_heads, group, 32, dim), dtype),
                whole,
                one,
                one,
            )
    raise ValueError(case.kernel)


def linear_arguments(heads, dtype, *, bits):
    """The output map of a model, of one vector, in 8 or 4 bits."""
    import jax
    import jax.numpy as jnp

    from jaxkv import pallas_kernels

    of, width = jax.ShapeDtypeStruct, -(-heads.kv_heads * heads.group * heads.dim // 32) * 32
    if bits == 8:
        beside = (of((width,), jnp.float32),)
        return pallas_kernels.multiply_codes, (
            of((1, width), dtype),
            of((width, width), jnp.int8),
            *beside,
        )
    group = of((width, width // 32), jnp.float16)
    given = (of((1, width), dtype), of((width, width // 2), jnp.uint8), group, group)
    return lambda x, codes, *of_groups: pallas_kernels.multiply_codes(
        x, codes, None, *of_groups
    ), given


def stored(kernels, store, batch, pool, dim):
    """Abstract keys and values of a pool as a store holds them."""
    import jax
    import jax.numpy as jnp

    of, group = jax.ShapeDtypeStruct, (batch, pool, dim // 32)
    eight = kernels.Coded(of((batch, pool, dim), jnp.int8), of((batch, pool), jnp.float16))
    codes = (
        of((batch, pool, dim // 2), jnp.uint8)
        if dim % 128
        else of((batch, pool, dim // 4), jnp.uint16)
    )
    four = kernels.Nibbles(codes, of(group, jnp.float16), of(group, jnp.float16))
    return {"int8": (eight, eight), "int4": (four, four), "mixed": (eight, four)}[store]


def step_arguments(kernel, heads, dtype, *, batch, pool):
    """What a decode step launches beside attention."""
    import jax
    import jax.numpy as jnp

    from jaxkv import pallas_kernels

    of, i32, f32 = jax.ShapeDtypeStruct, jnp.int32, jnp.float32
    if kernel == "add_norm":
        width = heads.kv_heads * heads.group * heads.dim
        shapes = (of((8, 1, width), dtype), of((8, 8, 1, width), f32), of((width,), dtype))
        return lambda *a: pallas_kernels.add_norm(*a, eps=1e-5), shapes
    rows, table, one = (
        of((batch, pool, heads.dim), dtype),
        of((batch, heads.kv_heads), i32),
        of((batch,), i32),
    )
    pools = (rows, rows, of((batch, pool), i32), of((batch, pool), f32))
    if kernel == "replace_rows":
        return pallas_kernels.replace_rows, (*pools, table, table, of(table.shape, bool))
    weigh = lambda score, pos, seen, prompt: (score, pos >= prompt)  # noqa: E731
    return lambda *a: pallas_kernels.evict_rows(*a, weigh=weigh), (*pools, *[table] * 4, one, one)


def token_arguments(heads, dtype, *, batch, pool, kind):
    """A new token's attention, for one of four layers whose chunks are dealt together."""
    import jax
    import jax.numpy as jnp

    from jaxkv import pallas_kernels
    from jaxkv.pallas_kernels.codes import itemsize_of

    of, i32, f32 = jax.ShapeDtypeStruct, jnp.int32, jnp.float32
    store = kind[1:] if kind[1:] in STORES else None
    rows = (of((batch, pool, heads.dim), dtype),) * 2
    if store:
        rows = stored(pallas_kernels, store, batch, pool, heads.dim)
    programs = pallas_kernels.programs(dim=heads.dim, itemsize=itemsize_of(*rows, dtype))

    def token(q, kv, cos, sin, positions, counts, k, v, pos, start, length, *more):
        chunks = pallas_kernels.deal(start, length, programs=programs)
        if kind == "_picked":
            options = {"picks": pallas_kernels.Picks(*more, start)}
        elif store:
            options = {"dtype": dtype}
        else:
            options = dict(zip(("score", "begin"), more, strict=False))
        given = (q, kv, cos, sin, positions, counts, k, v, pos, start, chunks)
        return pallas_kernels.decode_token(*given, layer=1, **options)

    # Queries, keys and values come in two parts that are to be added up.
    per_head, tables = (batch, heads.kv_heads), of((4, batch, heads.kv_heads), i32)
    angle, one = of((batch, heads.dim // 2), f32), of((batch,), i32)
    # Products come in parts, of eight sequences at least.
    new = (4, 8)
    shapes = (
        of((*new, heads.kv_heads, heads.group, heads.dim), f32),
        of((*new, 2, heads.kv_heads, heads.dim), f32),
    )
    shapes += (angle, angle, one, one, *rows, of((batch, pool), i32), tables, tables)
    more = {"_scored": (of((batch, pool), f32), of(per_head, f32))}
    more |= {"_picked": (of((batch, 1, 1024), i32), one, of((batch, 1), i32), tables)}
    return token, (*shapes, *more.get(kind, ()))
