"""Laws: sentences about all mechanisms of the package, each checked over pairs of them. docs/laws.md lists them."""
