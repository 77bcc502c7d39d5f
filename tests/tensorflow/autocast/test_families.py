"""TensorFlow's table of op families: complete over the public namespace, and each op in one place."""

import tensorflow as tf

from precision import FAMILIES, get_backend
from precision_tensorflow.opcast import coverage, families
from precision_tensorflow.opcast.replay import HANDLERS


def test_every_floating_op_of_the_public_namespace_has_a_family_or_a_reason():
    known = {entry.name for entry in coverage.op_table()}
    missing = [op for op in coverage.floating_ops() if op not in known]
    assert missing == []
    assert len(known) > 1000


def test_the_walk_sees_floating_ops_and_only_those():
    walked = set(coverage.floating_ops())
    assert {"MatMul", "Softmax", "While", "PyFunc", "Cast", "TensorListStack"} <= walked
    assert not {"LogicalAnd", "BitwiseAnd", "StringJoin", "NoOp"} & walked


def test_an_op_stands_in_one_place_and_exists():
    tables = [set(families.FAMILY), set(families.ENTERED)]
    assert not tables[0] & tables[1]
    assert all(hasattr(tf.raw_ops, name) for name in tables[0] | tables[1])
    assert set(families.FAMILY.values()) <= set(FAMILIES)
    assert families.VIEW <= set(families.FAMILY) and families.EXACT <= set(families.FAMILY)
    assert set(families.WHY) <= set(families.FAMILY)


def test_what_is_entered_has_a_handler():
    assert set(families.ENTERED) == set(HANDLERS)


def test_the_backend_lists_them_by_family():
    table = {entry.name: entry for entry in get_backend("tensorflow").op_table()}
    assert table["MatMul"].family == "matmul" and table["Square"].family == "transcendental"
    assert table["ResourceApplyAdam"].family is None and "variable" in table["ResourceApplyAdam"].why


def test_known_functions_are_public_ones_by_name():
    known = coverage.known_functions()
    assert {
        "tf.nn.gelu": "elementwise",
        "tf.nn.moments": "norm",
        "keras.ops.layer_normalization": "norm",
    }.items() <= known.items()
