"""Arrow arrays as columns of bytes and numbers: made, cut and joined without a Python call for each row."""
