"""Random JSON schemas, and a validator of what follows them, written from the specification alone."""

import json
import string

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

NAMES = st.text(string.ascii_letters + "_-$ ", min_size=1, max_size=6)
TEXTS = st.text(string.printable[:95], max_size=6)
LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}]),
    st.tuples(st.integers(0, 3), st.integers(3, 8)).map(
        lambda sizes: {"type": "string", "minLength": sizes[0], "maxLength": sizes[1]}
    ),
    st.tuples(st.integers(-99, 0), st.integers(1, 1000)).map(
        lambda ends: {"type": "integer", "minimum": ends[0], "maximum": ends[1]}
    ),
    st.integers(-20, 20).map(lambda least: {"type": "number", "minimum": least}),
    st.lists(
        st.one_of(st.none(), st.booleans(), st.integers(-9, 99), TEXTS), min_size=1, max_size=4
    ).map(lambda values: {"enum": values}),
    TEXTS.map(lambda value: {"const": value}),
)


@st.composite
def objects(draw, inner):
    """Schemas of objects: some of the properties are required, no other one is allowed."""
    properties = draw(st.dictionaries(NAMES, inner, max_size=4))
    required = draw(st.lists(st.sampled_from([*properties]), unique=True)) if properties else []
    kind = {"type": "object", "properties": properties, "required": required}
    return kind | {"additionalProperties": False}


def nest(inner):
    """Schemas that contain others."""
    sizes = st.tuples(st.integers(0, 2), st.integers(2, 3))
    arrays = st.tuples(inner, sizes).map(
        lambda of: {"type": "array", "items": of[0], "minItems": of[1][0], "maxItems": of[1][1]}
    )
    either = st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several})
    return st.one_of(objects(inner), arrays, either)


SCHEMAS = st.recursive(LEAVES, nest, max_leaves=6)


def random_schemas(count):
    """As many schemas, the same at every call."""
    found = {}

    @settings(max_examples=2 * count, phases=[Phase.generate], database=None)
    @given(SCHEMAS)
    def collect(schema):
        found[json.dumps(schema)] = schema

    collect()
    return [*found.values()][-count:]


def is_kind(value, kind):
    """Whether a value is of one of JSON's types; true is no number, and 1.0 an integer."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {
        "boolean": isinstance(value, bool),
        "null": value is None,
        "string": isinstance(value, str),
        "number": number,
        "integer": number and float(value).is_integer(),
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
    }[kind]


def same(one, other):
    """Equality of JSON values, where true is not 1."""
    return json.dumps(one) == json.dumps(other)


def follows(value, schema):
    """Whether a value follows a schema."""
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    tests = [not kinds or any(is_kind(value, kind) for kind in kinds)]
    if "anyOf" in schema:
        tests.append(any(follows(value, each) for each in schema["anyOf"]))
    if "enum" in schema:
        tests.append(any(same(value, each) for each in schema["enum"]))
    if "const" in schema:
        tests.append(same(value, schema["const"]))
    if isinstance(value, str):
        tests.append(schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 999))
    if is_kind(value, "number"):
        low, high = schema.get("minimum", float("-inf")), schema.get("maximum", float("inf"))
        tests.append(low <= value <= high)
    if isinstance(value, list):
        tests.append(schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 999))
        tests += [follows(each, schema.get("items", {})) for each in value]
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        tests.append({*schema.get("required", [])} <= {*value})
        tests.append(schema.get("additionalProperties", True) or {*value} <= {*properties})
        tests += [follows(each, properties.get(name, {})) for name, each in value.items()]
    return all(tests)
