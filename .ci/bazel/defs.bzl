"""The one Bazel file of this project that BUILD files load from.

They call `peft_library` and `peft_test` and never a native Python rule: Bazel 8
has none and no WORKSPACE either, so that moving there changes this file (to
rules_python and a MODULE.bazel) and no BUILD file.

Everything works offline. Packages of the index come from `.venv`, which
`make venv` made from the lock: each one that is installed there is a target of
`@peftlib_python`, so that queries show who needs what; all stand for the one
environment that the interpreter belongs to.
"""

_PYTHON = "peftlib_python"
_REPOSITORY = "tests/repository"

def peft_library(
        name,
        srcs,
        visibility,
        deps = [],
        requirements = [],
        data = []):
    """A py_library of one module.

    Args:
      name: The module's name; that of its package for an `__init__.py`.
      srcs: The module.
      visibility: Who may depend on it: everyone, if it is of the public API.
      deps: The targets of our own modules that it imports.
      requirements: The packages of the lock that it imports.
      data: Files that it reads.
    """
    native.py_library(
        name = name,
        srcs = srcs,
        deps = deps + _requirements(requirements),
        data = data,
        visibility = visibility,
    )

def peft_test(
        name,
        srcs,
        deps = [],
        requirements = [],
        data = [],
        shard_count = None,
        optimized = False):
    """A py_test of one `_test.py` file.

    Args:
      name: The file's name without its suffix.
      srcs: The file.
      deps: As in peft_library.
      requirements: As in peft_library.
      data: As in peft_library.
      shard_count: How many processes share its cases.
      optimized: Whether XLA optimizes what it compiles. Most programs of the
        tests take longer to optimize than to run.
    """

    # As tests/conftest.py does.
    env = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    if not optimized:
        env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    native.py_test(
        name = name,
        srcs = srcs,
        deps = deps + _requirements(requirements),
        data = data,
        env = env,
        python_version = "PY3",
        shard_count = shard_count,
        # Ends a test, or a shard of it, after five minutes.
        size = "medium",
        # Tests about the repository read the checkout, of which Bazel knows
        # nothing: what they said last time may no longer hold.
        tags = ["external"] if native.package_name() == _REPOSITORY else [],
    )

def _requirements(names):
    return ["@%s//:%s" % (_PYTHON, name) for name in names]

def _installed(venv):
    """The names under which Python finds what is installed in a venv."""
    names = {}
    for python in venv.get_child("lib").readdir():
        for path in python.get_child("site-packages").readdir():
            name = path.basename
            if name.endswith(".py"):
                name = name[:-len(".py")]
            if name and not [c for c in name.elems() if not (c.isalnum() or c == "_")]:
                names[name] = True
    return sorted(names)

def _venv_python_impl(ctx):
    venv = ctx.path(Label("//:WORKSPACE")).dirname.get_child(".venv")
    python = venv.get_child("bin").get_child("python")

    # Written last: without it, packages are still being installed.
    stamp = venv.get_child(".stamp-packages")
    if not python.exists or not stamp.exists:
        fail("No %s, or not all of it: run 'make venv' first." % python)

    # Asked for by its label, it has Bazel look again when it is another one.
    ctx.path(Label("//:.venv/.stamp-packages"))
    ctx.file("BUILD", """\
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

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
""" % python + "".join([
        "\npy_library(name = \"%s\")\n" % name
        for name in _installed(venv)
    ]))

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
