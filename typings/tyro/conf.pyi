Suppress: object
