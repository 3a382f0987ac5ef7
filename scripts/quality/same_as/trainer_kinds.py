"""The kinds of trainers of `other_trainers`: a name, and the methods that it runs."""

KINDS: tuple[tuple[str, str], ...] = tuple(
    (kind, method)
    for kind in (
        *("own fit", "bare class", "own init", "bare function", "of the registry", "other estimator"),
        *("own advantages", "own save", "polite save", "wrapped by a plugin", "copies", "omits", "by name"),
        *("made in another thread", "works in a thread", "twins", "two runs", "shared configuration"),
        *("V1 sync", "V1 of another package", "V1 own way", "V1 not chosen", "V1 own checkpoints", "V1 wrapped"),
    )
    for method in ("hadw", "gdpo", "drgrpo", "grpo")
)
