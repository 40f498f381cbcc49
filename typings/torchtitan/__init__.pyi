# What rescale_data uses of torchtitan, which is installed in an environment of its own.
