"""Where a stream of changes meets a data set that was published in the place of what it has read.

The records that a swap brings are no changes, so a stream that read on would miss them without a word.  It is
complete up to the version before the swap, and fails there.  From the version of the swap on, with a snapshot
or without, readers begin in the new generation.
"""

from floodmark.model.errors import GenerationSwapped
from floodmark.model.version import Version, moment_of


def no_swap(_namespace: int | None, _position: Version) -> Version | None:
    """The first swap above a position at a site at which no data set was published."""
    return None


def end_before_swap(swap: Version | None, position: Version, end: Version) -> Version:
    """How far a stream at a position may go towards an end; GenerationSwapped if not at all."""
    if swap is None or swap > end:
        return end
    if swap - 1 <= position:
        raise GenerationSwapped(
            f"a data set was published at version {swap} ({moment_of(swap).isoformat()}) and replaced what "
            f"was read so far; the stream is complete up to {position}. Begin again with a snapshot "
            f'(since="snapshot"), or, to leave the data set out, with the changes after version {swap}',
            version=position,
            oldest=swap,
        )
    return swap - 1
