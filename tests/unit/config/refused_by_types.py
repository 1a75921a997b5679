"""What mypy is to refuse: where it no longer does, `warn_unused_ignores` makes the comment an error of `make types`."""

from shardwise.config.resolve import Config, ResolvedConfig


def resolve_once() -> None:
    resolved: ResolvedConfig = Config()  # type: ignore[assignment]
    resolved.model_copy().resolve(2)  # type: ignore[arg-type]
