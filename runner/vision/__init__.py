"""Pictures in: decoding, preprocessing, vision encoders and the projectors of mmproj files."""
