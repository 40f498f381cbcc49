"""What pyproject.toml cannot say: the C extension, which is left out where there is no compiler."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            f"rescale_data.nodes.reading.{name}",
            [f"rescale_data/nodes/reading/{name}.c"],
            extra_compile_args=["-O3"],
            optional=True,
            py_limited_api=True,
        )
        for name in ("kernel", "draws")
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
