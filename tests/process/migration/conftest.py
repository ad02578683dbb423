"""The scripts need Lightning and have no examples: pytest does not import them."""

collect_ignore = ["scripts"]
