//! Where a kernel's parameters are in its arguments, as a server that takes code has told, and how a launch's arguments are copied by it.
//!
//! Knows no kernel.
#![allow(unsafe_code, reason = "a launch's arguments are addresses of the program's")]

use crate::generated::values::cudaErrorInvalidValue;
use crate::stub::Failure;

/// A kernel's parameters have at most 32 764 bytes (PTX 8.1 on; 4 352 before), and so no more of them.
const MOST_ARGUMENTS: u32 = 32_764;

/// Where a kernel's parameters are in its arguments.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    /// Bytes of all.
    pub(crate) size: usize,
    /// Begin and length of each.
    pub(crate) parameters: Vec<(usize, usize)>,
}

impl Layout {
    /// From what the server told: the size of all, how many there are, and where each is. What contradicts itself is not copied by.
    pub(crate) fn new((size, count, places): (u32, u32, Vec<(u32, u32)>)) -> Result<Self, Failure> {
        let is_within = |(begin, length): &(u32, u32)| begin.checked_add(*length).is_some_and(|end| end <= size);
        let is_whole = u32::try_from(places.len()) == Ok(count);
        if size > MOST_ARGUMENTS || !is_whole || !places.iter().all(is_within) {
            return Err(Failure::Gone);
        }
        let index = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
        let parameters = places.into_iter().map(|(begin, length)| (index(begin), index(length)));
        Ok(Self {
            size: index(size),
            parameters: parameters.collect(),
        })
    }

    /// The arguments of a launch as the kernel has them.
    ///
    /// # Safety
    ///
    /// At `arguments` is NULL, or as many addresses as there are parameters, each NULL or with the parameter's bytes behind it.
    pub(crate) unsafe fn gather(&self, arguments: *mut *mut std::ffi::c_void) -> Result<Vec<u8>, Failure> {
        let mut bytes = vec![0; self.size];
        if arguments.is_null() && !self.parameters.is_empty() {
            return Err(Failure::Code(cudaErrorInvalidValue));
        }
        for (index, &(begin, length)) in self.parameters.iter().enumerate() {
            // SAFETY: 1. there are as many addresses as parameters.
            let place = unsafe { arguments.wrapping_add(index).read_unaligned() };
            if place.is_null() {
                return Err(Failure::Code(cudaErrorInvalidValue));
            }
            if let Some(to) = bytes.get_mut(begin..begin + length) {
                // SAFETY: 1. the program has a parameter's bytes there; 2. `to` is as long, and this function's own.
                unsafe { place.cast::<u8>().copy_to_nonoverlapping(to.as_mut_ptr(), length) };
            }
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_gathered_as_the_layout_has_them() {
        let layout = Layout::new((24, 3, vec![(0, 4), (8, 8), (16, 3)])).unwrap();
        let (mut one, mut two, mut three) = (0x0403_0201_u32, 0x1122_3344_5566_7788_u64, [9_u8, 8, 7]);
        let mut places = [(&raw mut one).cast(), (&raw mut two).cast(), (&raw mut three).cast()];
        // SAFETY: 1. there are three addresses, each of as many bytes as its parameter.
        let bytes = unsafe { layout.gather(places.as_mut_ptr()) }.unwrap();
        assert_eq!(bytes[..8], [1, 2, 3, 4, 0, 0, 0, 0]);
        assert_eq!(bytes[8..16], two.to_le_bytes());
        assert_eq!(bytes[16..], [9, 8, 7, 0, 0, 0, 0, 0]);
        places[1] = std::ptr::null_mut();
        // SAFETY: 1. the same, and one is NULL.
        let refused = unsafe { layout.gather(places.as_mut_ptr()) };
        assert_eq!(refused, Err(Failure::Code(1)));
        // SAFETY: 1. NULL is allowed.
        let refused = unsafe { layout.gather(std::ptr::null_mut()) };
        assert_eq!(refused, Err(Failure::Code(1)));
        // SAFETY: 1. the same.
        let none = unsafe { Layout::default().gather(std::ptr::null_mut()) };
        assert_eq!(none, Ok(Vec::new()));
    }

    #[test]
    fn a_layout_that_contradicts_itself_is_refused() {
        for wrong in [
            (8, 1, vec![(4, 8)]),
            (8, 1, vec![(u32::MAX, 1)]),
            (8, 2, vec![(0, 4)]),
            (MOST_ARGUMENTS + 4, 0, vec![]),
        ] {
            assert_eq!(Layout::new(wrong.clone()).unwrap_err(), Failure::Gone, "{wrong:?}");
        }
    }
}
