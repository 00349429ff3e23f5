from __future__ import annotations

import pickle

import pytest

from prorl_env import errors
from prorl_env.errors import CODES, ProrlError, RemoteFault, TaskFileError, from_wire, to_wire

CLASSES = sorted(CODES.values(), key=lambda cls: cls.code)


def make(cls: type[ProrlError]) -> ProrlError:
    return cls("what happened", **{name: f"<{name}>" for name in cls.fields})


def test_every_class_of_the_module_is_in_the_table() -> None:
    classes = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, ProrlError)}
    assert classes == set(CODES.values())
    assert len(CODES) == len(classes), "two classes share a code"


def test_the_tree_in_the_docstring_names_every_class() -> None:
    assert errors.__doc__ is not None
    assert [cls.__name__ for cls in CLASSES if cls.__name__ not in errors.__doc__] == []


@pytest.mark.parametrize("cls", CLASSES)
def test_it_pickles_with_its_fields(cls: type[ProrlError]) -> None:
    error = make(cls)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert again.args == error.args
    assert [getattr(again, name) for name in cls.fields] == [f"<{name}>" for name in cls.fields]


@pytest.mark.parametrize("cls", CLASSES)
def test_it_crosses_the_wire_both_ways(cls: type[ProrlError]) -> None:
    error = make(cls)
    again = from_wire(*to_wire(error))
    assert type(again) is cls
    assert str(again) == str(error)
    assert to_wire(again) == to_wire(error)


def test_a_foreign_exception_becomes_a_fault_with_its_traceback() -> None:
    error = from_wire(*to_wire(ZeroDivisionError("by zero"), traceback="the lines"))
    assert isinstance(error, RemoteFault)
    assert (error.type_name, error.traceback) == ("ZeroDivisionError", "the lines")
    assert "by zero" in str(error)


def test_a_subclass_from_elsewhere_is_not_sent_as_its_parent() -> None:
    class Theirs(TaskFileError):
        pass

    assert to_wire(Theirs("x"))[0] == RemoteFault.code


def test_an_unknown_code_is_not_lost() -> None:
    error = from_wire("from_the_future", "hello", {"x": 1})
    assert isinstance(error, RemoteFault)
    assert "from_the_future" in str(error)
    assert "hello" in str(error)


def test_fields_from_the_other_side_are_only_those_of_the_class() -> None:
    error = from_wire("task_file", "m", {"path": "p", "__class__": "evil", "line": 3})
    assert isinstance(error, TaskFileError)
    assert (error.path, error.line, error.field) == ("p", 3, None)


def test_a_wrong_field_is_a_programming_error() -> None:
    with pytest.raises(TypeError, match="no field 'colour'"):
        TaskFileError("m", colour="red")
