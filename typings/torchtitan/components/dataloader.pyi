from dataclasses import dataclass

class BaseDataLoader:
    @dataclass(kw_only=True, slots=True)
    class Config: ...
