"""The one Bazel file of this project that BUILD files load from.

They call `peft_library` and `peft_test` and never a native Python rule: Bazel 8
has none and no WORKSPACE either, so that moving there changes this file (to
rules_python and a MODULE.bazel) and no BUILD file.

Everything works offline. Packages of the index come from `.venv`, which
`make venv` made from the lock: they are named in `requirements`, and all stand
for the one environment that the interpreter belongs to.
"""

_PYTHON = "peftlib_python"
_REPOSITORY = "tests/repository"

def peft_library(name, srcs, deps = [], requirements = [], data = []):
    """A py_library of one module.

    Args:
      name: The module's name; that of its package for an `__init__.py`.
      srcs: The module.
      deps: The targets of our own modules that it imports.
      requirements: The packages of the lock that it imports.
      data: Files that it reads.
    """
    native.py_library(
        name = name,
        srcs = srcs,
        deps = deps + _requirements(requirements),
        data = data,
        visibility = ["//visibility:public"],
    )

def peft_test(name, srcs, deps = [], requirements = [], data = []):
    """A py_test of one `_test.py` file; its arguments are peft_library's."""
    native.py_test(
        name = name,
        srcs = srcs,
        deps = deps + _requirements(requirements),
        data = data,
        env = {"JAX_PLATFORMS": "cpu"},
        python_version = "PY3",
        size = "large",
        # Tests about the repository read the checkout, of which Bazel knows
        # nothing: what they said last time may no longer hold.
        tags = ["external"] if native.package_name() == _REPOSITORY else [],
    )

def _requirements(names):
    return ["@%s//:packages" % _PYTHON] if names else []

def _venv_python_impl(ctx):
    root = ctx.path(Label("//:WORKSPACE")).dirname
    python = root.get_child(".venv").get_child("bin").get_child("python")
    if not python.exists:
        fail("No %s: run 'make venv' first." % python)
    ctx.file("BUILD", """\
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

py_library(name = "packages", visibility = ["//visibility:public"])

py_runtime(
    name = "runtime",
    interpreter_path = "%s",
    python_version = "PY3",
)

py_runtime_pair(name = "pair", py3_runtime = ":runtime")

toolchain(
    name = "toolchain",
    toolchain = ":pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
""" % python)

# Its path is that of a checkout, so it is looked at anew in each.
_venv_python = repository_rule(
    implementation = _venv_python_impl,
    local = True,
)

def _native_rules_impl(ctx):
    ctx.file("BUILD", ctx.attr.build)
    if ctx.attr.package:
        ctx.file(ctx.attr.package + "/BUILD", ctx.attr.package_build)
        ctx.file(ctx.attr.package + "/defs.bzl", "".join([
            "%s = %s\n" % (symbol, target)
            for symbol, target in ctx.attr.symbols.items()
        ]))

# Bazel 4's own tools load these repositories from the network, for rules that
# it has built in: each is given here as names of the built-in ones.
_native_rules = repository_rule(
    implementation = _native_rules_impl,
    attrs = {
        "build": attr.string(),
        "package": attr.string(),
        "package_build": attr.string(),
        "symbols": attr.string_dict(),
    },
)

def _native(names):
    return {name: "native." + name for name in names}

def offline_repositories():
    """Declares the interpreter and what Bazel would otherwise download."""
    _venv_python(name = _PYTHON)
    native.register_toolchains("@%s//:toolchain" % _PYTHON)
    _native_rules(
        name = "rules_cc",
        package = "cc",
        package_build = """\
alias(
    name = "toolchain_type",
    actual = "@bazel_tools//tools/cpp:toolchain_type",
    visibility = ["//visibility:public"],
)
""",
        symbols = _native([
            "cc_binary",
            "cc_import",
            "cc_library",
            "cc_test",
            "cc_toolchain",
            "cc_toolchain_suite",
            "objc_library",
        ]),
    )
    _native_rules(
        name = "rules_java",
        package = "java",
        symbols = _native([
            "java_binary",
            "java_import",
            "java_library",
            "java_proto_library",
            "java_runtime",
            "java_toolchain",
        ]),
    )
    _native_rules(
        name = "rules_proto",
        package = "proto",
        symbols = dict(
            _native(["proto_lang_toolchain", "proto_library"]),
            ProtoInfo = "ProtoInfo",
        ),
    )
    _native_rules(
        name = "remote_coverage_tools",
        build = """\
filegroup(name = "lcov_merger", visibility = ["//visibility:public"])

filegroup(
    name = "coverage_report_generator",
    visibility = ["//visibility:public"],
)
""",
    )
