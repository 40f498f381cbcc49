"""What pyproject.toml cannot say: the C extension."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "rescale_data.nodes.reading.kernel",
            ["rescale_data/nodes/reading/kernel.c", "rescale_data/nodes/reading/draws.c"],
            extra_compile_args=["-O3"],
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
