"""Names of models that are generated, apart from the generator so that listing them needs no torch."""

TINY = "random:tiny"
