//! Tensors of four dimensions and filters in a client's memory: read into dense rows, and written back with `alpha` and `beta`.
//!
//! Whatever strides a client's tensor has, operations see it by images, channels, rows and columns. Knows no operation.

use accel_proto::{List, SvmAddress};

use crate::Error;
use crate::descriptor::{Descriptor, size};
use crate::memory::Memory;
use crate::numeric::{Real, Type, room};
use accel_proto::cuda::parts::{CUDNN_SET_FILTER_ND_DESCRIPTOR, CUDNN_SET_TENSOR_ND_DESCRIPTOR};

/// Images, channels, rows, columns.
pub(crate) type Dims = [usize; 4];

/// `CUDNN_TENSOR_NCHW` and `CUDNN_TENSOR_NHWC`.
const NCHW: i32 = 0;
const NHWC: i32 = 1;

/// Where a tensor's elements are, from its address on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tensor {
    pub(crate) kind: Type,
    pub(crate) dims: Dims,
    strides: Dims,
    /// How many elements there are, and from which to which place they are.
    count: usize,
    span: usize,
}

impl Tensor {
    fn new(kind: Type, dims: Dims, strides: Dims) -> Result<Self, Error> {
        let large = || Error::Invalid("a tensor that is larger than any memory");
        let product = |product: usize, size: &usize| product.checked_mul(*size);
        let count = dims.iter().try_fold(1, product).ok_or_else(large)?;
        let last = dims.iter().zip(strides).try_fold(0_usize, |sum, (size, stride)| {
            sum.checked_add((size - 1).checked_mul(stride)?)
        });
        let span = last.and_then(|last| last.checked_add(1)).ok_or_else(large)?;
        span.checked_mul(kind.bytes()).ok_or_else(large)?;
        if count > span {
            return Err(Error::NotComputed("a tensor whose elements lie on each other"));
        }
        Ok(Self {
            kind,
            dims,
            strides,
            count,
            span,
        })
    }

    /// Of a `cudnnTensorDescriptor_t`.
    pub(crate) fn of(words: &List<'_, i32>) -> Result<Self, Error> {
        let descriptor = Descriptor::new(words)?;
        let unset = Error::Invalid("a tensor's descriptor that nothing was put into");
        let [kind, count, rest @ ..] = descriptor.find(CUDNN_SET_TENSOR_ND_DESCRIPTOR).ok_or(unset)? else {
            return Err(Error::Invalid("a tensor's descriptor without dimensions"));
        };
        let kind = Type::of_cudnn(*kind)?;
        let (dims, strides) = rest.split_at(rest.len() / 2);
        if usize::try_from(*count).ok() != Some(dims.len()) || dims.len() != strides.len() {
            return Err(Error::Invalid(
                "a tensor's descriptor whose lists have other lengths than it says",
            ));
        }
        let (dims, strides) = (four(dims)?, four(strides)?);
        Self::new(kind, dims, strides)
    }

    /// Of a `cudnnFilterDescriptor_t`.
    pub(crate) fn of_filter(words: &List<'_, i32>) -> Result<Self, Error> {
        let descriptor = Descriptor::new(words)?;
        let unset = Error::Invalid("a filter's descriptor that nothing was put into");
        let [kind, format, count, dims @ ..] = descriptor.find(CUDNN_SET_FILTER_ND_DESCRIPTOR).ok_or(unset)? else {
            return Err(Error::Invalid("a filter's descriptor without dimensions"));
        };
        let kind = Type::of_cudnn(*kind)?;
        if usize::try_from(*count).ok() != Some(dims.len()) {
            return Err(Error::Invalid(
                "a filter's descriptor whose list has another length than it says",
            ));
        }
        let dims = four(dims)?;
        let [_, channels, _, columns] = dims;
        let products = |sizes: &[usize]| {
            let product = sizes
                .iter()
                .try_fold(1_usize, |product, size| product.checked_mul(*size));
            product.ok_or(Error::Invalid("a filter that is larger than any memory"))
        };
        let strides = match *format {
            NCHW => [products(&dims[1..])?, products(&dims[2..])?, columns, 1],
            NHWC => [products(&dims[1..])?, 1, products(&[columns, channels])?, channels],
            _ => return Err(Error::NotComputed("a filter that is neither NCHW nor NHWC")),
        };
        Self::new(kind, dims, strides)
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Whether its elements are one behind the other.
    fn is_dense(&self) -> bool {
        let [_, c, h, w] = self.dims;
        let wanted = [c * h * w, h * w, w, 1];
        let stands = |(size, (stride, wanted)): (usize, (usize, usize))| size == 1 || stride == wanted;
        self.dims
            .into_iter()
            .zip(self.strides.into_iter().zip(wanted))
            .all(stands)
    }

    fn length(&self) -> u64 {
        (self.span * self.kind.bytes()) as u64
    }

    /// Whether all of it is in one allocation; before room is made for as many elements.
    pub(crate) fn check(&self, memory: &Memory, at: SvmAddress) -> Result<(), Error> {
        memory.bytes(at.0, self.length())?;
        Ok(())
    }

    /// Its elements, as they are computed with.
    pub(crate) fn read<T: Real>(&self, memory: &Memory, at: SvmAddress) -> Result<Vec<T>, Error> {
        let bytes = memory.bytes(at.0, self.length())?;
        let mut values = room(self.count)?;
        if self.is_dense() {
            T::read(self.kind, bytes, &mut values);
            return Ok(values);
        }
        let size = self.kind.bytes();
        let mut places = values.iter_mut();
        self.each_row(|at| {
            for column in 0..self.dims[3] {
                let at = (at + column * self.strides[3]) * size;
                if let Some(place) = places.next() {
                    T::read(self.kind, &bytes[at..at + size], std::slice::from_mut(place));
                }
            }
        });
        Ok(values)
    }

    /// Writes `alpha * values + beta * what was there`.
    pub(crate) fn write<T: Real>(
        &self,
        memory: &mut Memory,
        at: SvmAddress,
        [alpha, beta]: [T; 2],
        mut values: Vec<T>,
    ) -> Result<(), Error> {
        if alpha != T::ONE {
            values.iter_mut().for_each(|value| *value = *value * alpha);
        }
        if !beta.is_zero() {
            let before = self.read::<T>(memory, at)?;
            for (value, before) in values.iter_mut().zip(before) {
                *value += beta * before;
            }
        }
        let bytes = memory.bytes_mut(at.0, self.length())?;
        if self.is_dense() {
            T::write(self.kind, &values, bytes);
            return Ok(());
        }
        let size = self.kind.bytes();
        let mut values = values.iter();
        self.each_row(|at| {
            for column in 0..self.dims[3] {
                let at = (at + column * self.strides[3]) * size;
                if let Some(value) = values.next() {
                    T::write(self.kind, std::slice::from_ref(value), &mut bytes[at..at + size]);
                }
            }
        });
        Ok(())
    }

    /// Where each row begins, in the order of images, channels and rows.
    fn each_row(&self, mut each: impl FnMut(usize)) {
        let ([n, c, h, _], [by_n, by_c, by_h, _]) = (self.dims, self.strides);
        for image in 0..n {
            for channel in 0..c {
                for row in 0..h {
                    each(image * by_n + channel * by_c + row * by_h);
                }
            }
        }
    }
}

/// Three or four numbers as four; of three, cuDNN's documentation says that they are images, channels and columns.
fn four(numbers: &[i32]) -> Result<Dims, Error> {
    match *numbers {
        [n, c, h, w] => Ok([size(n)?, size(c)?, size(h)?, size(w)?]),
        [n, c, w] => Ok([size(n)?, size(c)?, 1, size(w)?]),
        _ => Err(Error::NotComputed("a tensor of other than three or four dimensions")),
    }
}

/// The scalars of a call, which have as many bytes as what is computed in.
pub(crate) fn scalar<T: Real>(bytes: &List<'_, u8>) -> Result<T, Error> {
    let bytes = bytes.bytes();
    let kind = match bytes.len() {
        2 => Type::F16,
        4 => Type::F32,
        8 => Type::F64,
        _ => return Err(Error::Invalid("a scalar of no size that a type has")),
    };
    let mut value = [T::default()];
    T::read(kind, bytes, &mut value);
    Ok(value[0])
}

#[cfg(test)]
mod tests {
    use accel_cuda_null::Quota;

    use super::*;

    struct Endless;

    impl Quota for Endless {
        fn charge(&mut self, _: u64) -> bool {
            true
        }

        fn give_back(&mut self, _: u64) {}
    }

    fn tensor(dims: [i32; 4], strides: [i32; 4]) -> Result<Tensor, Error> {
        let mut words = vec![CUDNN_SET_TENSOR_ND_DESCRIPTOR, 10, 0, 4];
        words.extend(dims);
        words.extend(strides);
        Tensor::of(&List::new(&words))
    }

    #[test]
    fn a_tensor_is_read_and_written_by_its_strides() {
        let mut memory = Memory::new(1 << 20);
        memory.add(0x1000, 4 * 100, &mut Endless).unwrap();
        let numbers: Vec<f32> = (0..100_u8).map(f32::from).collect();
        f32::write(Type::F32, &numbers, memory.bytes_mut(0x1000, 400).unwrap());
        // Two images of two channels and 2 x 3, with the channels innermost.
        let nhwc = tensor([2, 2, 2, 3], [12, 1, 6, 2]).unwrap();
        let at = SvmAddress(0x1000);
        let read = nhwc.read::<f64>(&memory, at).unwrap();
        let wanted = |n: usize, c: usize, h: usize, w: usize| f64::from(numbers[n * 12 + h * 6 + w * 2 + c]);
        for (index, value) in read.iter().enumerate() {
            let (n, c, h, w) = (index / 12, index / 6 % 2, index / 3 % 2, index % 3);
            assert_eq!(*value, wanted(n, c, h, w));
        }
        nhwc.write(&mut memory, at, [10.0, 1.0], read).unwrap();
        let mut after = [0.0_f32; 25];
        f32::read(Type::F32, memory.bytes(0x1000, 100).unwrap(), &mut after);
        assert!(
            (0..24).all(|place| after[place] == 11.0 * numbers[place]) && after[24] == 24.0,
            "{after:?}"
        );
        // With gaps between rows, and the last element the allocation's last.
        let gaps = tensor([1, 1, 10, 3], [1, 1, 10, 4]).unwrap();
        assert_eq!((gaps.span, gaps.count), (99, 30));
        assert_eq!(gaps.read::<f32>(&memory, SvmAddress(0x1004)).unwrap()[29], 99.0);
        assert!(gaps.read::<f32>(&memory, SvmAddress(0x1008)).is_err());
    }

    #[test]
    fn tensors_that_are_none_are_refused() {
        for (dims, strides) in [
            ([0, 1, 1, 1], [1, 1, 1, 1]),
            ([1, -1, 1, 1], [1, 1, 1, 1]),
            ([2, 2, 2, 2], [1, 1, 1, 1]),
            ([2, 1, 1, 1], [0, 1, 1, 1]),
            ([i32::MAX; 4], [i32::MAX; 4]),
        ] {
            assert!(tensor(dims, strides).is_err(), "{dims:?} {strides:?}");
        }
        for words in [
            &[][..],
            &[CUDNN_SET_TENSOR_ND_DESCRIPTOR, 1, 0],
            &[CUDNN_SET_TENSOR_ND_DESCRIPTOR, 4, 0, 3, 1, 1],
            &[CUDNN_SET_TENSOR_ND_DESCRIPTOR, 4, 3, 1, 1, 1],
        ] {
            assert!(Tensor::of(&List::new(words)).is_err(), "{words:?}");
        }
    }

    #[test]
    fn filters_have_their_channels_outside_or_inside() {
        let filter = |format| {
            Tensor::of_filter(&List::new(&[
                CUDNN_SET_FILTER_ND_DESCRIPTOR,
                7,
                0,
                format,
                4,
                2,
                3,
                4,
                5,
            ]))
            .unwrap()
        };
        assert_eq!(filter(0).strides, [60, 20, 5, 1]);
        assert_eq!(filter(1).strides, [60, 1, 15, 3]);
        assert!(filter(0).is_dense() && !filter(1).is_dense());
        assert!(Tensor::of_filter(&List::new(&[CUDNN_SET_FILTER_ND_DESCRIPTOR, 7, 0, 2, 4, 2, 3, 4, 5])).is_err());
    }
}
