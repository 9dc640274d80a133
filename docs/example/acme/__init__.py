"""Parts of Acme's: importing this package registers all of them."""

from acme import converter, dataset, flavor, loss, model, optimizer, schedule, sink, tokenizer, trainer  # noqa: F401
