//! OCI images in, read-only uncompressed erofs images out, stored once by digest.
