"""The steps of a commit: what may enter, the rows it becomes, and the turn in which it is written."""
