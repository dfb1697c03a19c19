//! Guest physical memory: layout, backing, checked access.
