//! cuBLAS' products of matrices and of matrices with vectors. Matrices are in columns, as cuBLAS has them.
//!
//! Operands are read into rows of the type that is computed in, and the result is written when it is whole, so that an operand that
//! overlaps the result is what it was before. Knows no descriptor.

use accel_proto::cuda::{
    CublasDgemmStridedBatched, CublasDgemmV2, CublasDgemvV2, CublasGemmEx, CublasGemmStridedBatchedEx,
    CublasSgemmStridedBatched, CublasSgemmV2, CublasSgemvV2,
};
use accel_proto::{List, SvmAddress};

use crate::Error;
use crate::descriptor::count;
use crate::memory::Memory;
use crate::numeric::{Matrix, Real, Stop, Type, multiply, room};
use crate::tensor::scalar;

/// `cublasOperation_t`: whether a matrix is transposed.
pub(crate) fn is_transposed(operation: i32) -> Result<bool, Error> {
    match operation {
        0 => Ok(false),
        // Conjugation changes no real number.
        1 | 2 => Ok(true),
        _ => Err(Error::Invalid("an operation that cuBLAS does not have")),
    }
}

/// A matrix of a client's, in columns (or a layout's rows, which are the columns of its transpose).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operand {
    pub(crate) at: SvmAddress,
    pub(crate) kind: Type,
    /// Elements from one column to the next.
    pub(crate) leading: usize,
    pub(crate) is_transposed: bool,
    /// Elements from one matrix to the next of several.
    pub(crate) stride: i64,
}

impl Operand {
    /// That of one of several.
    fn of(&self, index: usize) -> Result<SvmAddress, Error> {
        let bytes = i64::try_from(self.kind.bytes() * index).ok();
        let by = bytes.and_then(|bytes| bytes.checked_mul(self.stride));
        let at = by.and_then(|by| self.at.0.checked_add_signed(by));
        at.map(SvmAddress)
            .ok_or(Error::Invalid("a stride that is larger than any memory"))
    }

    fn span(&self, [rows, columns]: [usize; 2]) -> Result<u64, Error> {
        if self.leading < rows.max(1) {
            return Err(Error::Invalid("a leading dimension that is less than a column has"));
        }
        let last = columns
            .checked_sub(1)
            .and_then(|columns| columns.checked_mul(self.leading));
        let elements = last.and_then(|last| last.checked_add(rows));
        elements
            .and_then(|elements| u64::try_from(elements.checked_mul(self.kind.bytes())?).ok())
            .ok_or(Error::Invalid("a matrix that is larger than any memory"))
    }

    /// Whether all of it is in one allocation.
    fn check(&self, memory: &Memory, index: usize, sizes: [usize; 2]) -> Result<(), Error> {
        memory.bytes(self.of(index)?.0, self.span(sizes)?)?;
        Ok(())
    }

    /// Its elements, of so many rows and columns as they are in memory, without gaps.
    pub(crate) fn read<T: Real>(&self, memory: &Memory, index: usize, sizes: [usize; 2]) -> Result<Vec<T>, Error> {
        let [rows, columns] = sizes;
        if rows == 0 || columns == 0 {
            return Ok(Vec::new());
        }
        let bytes = memory.bytes(self.of(index)?.0, self.span(sizes)?)?;
        let mut values = room(rows * columns)?;
        let size = self.kind.bytes();
        if self.leading == rows {
            T::read(self.kind, bytes, &mut values);
            return Ok(values);
        }
        for (column, bytes) in values.chunks_exact_mut(rows).zip(bytes.chunks(self.leading * size)) {
            T::read(self.kind, &bytes[..rows * size], column);
        }
        Ok(values)
    }

    pub(crate) fn write<T: Real>(
        &self,
        memory: &mut Memory,
        index: usize,
        sizes: [usize; 2],
        values: &[T],
    ) -> Result<(), Error> {
        let rows = sizes[0];
        let bytes = memory.bytes_mut(self.of(index)?.0, self.span(sizes)?)?;
        let size = self.kind.bytes();
        for (column, bytes) in values.chunks_exact(rows).zip(bytes.chunks_mut(self.leading * size)) {
            T::write(self.kind, column, &mut bytes[..rows * size]);
        }
        Ok(())
    }
}

/// `d = then(alpha * op(a) * op(b) + beta * c)`, for each of several. Columns of `d` are given to `then` with their index.
pub(crate) struct Product<T> {
    pub(crate) sizes: [usize; 3],
    pub(crate) alpha: T,
    pub(crate) beta: T,
    pub(crate) a: Operand,
    pub(crate) b: Operand,
    pub(crate) c: Operand,
    pub(crate) d: Operand,
    pub(crate) batch: usize,
}

impl<T: Real> Product<T> {
    /// Computes it.
    pub(crate) fn carry_out(
        &self,
        memory: &mut Memory,
        stop: Stop<'_>,
        mut then: impl FnMut(&mut [T]),
    ) -> Result<(), Error> {
        let [m, k, n] = self.sizes;
        let stored = |operand: &Operand, [rows, columns]: [usize; 2]| {
            if operand.is_transposed {
                [columns, rows]
            } else {
                [rows, columns]
            }
        };
        let strides =
            |operand: &Operand, [rows, _]: [usize; 2]| if operand.is_transposed { [rows, 1] } else { [1, rows] };
        let (of_a, of_b) = (stored(&self.a, [m, k]), stored(&self.b, [k, n]));
        // Leading dimensions are compared even where nothing is read.
        for (operand, sizes) in [(&self.a, of_a), (&self.b, of_b), (&self.c, [m, n]), (&self.d, [m, n])] {
            operand.span([sizes[0], sizes[1].max(1)])?;
        }
        if m == 0 || n == 0 {
            return Ok(());
        }
        // Without alpha neither is looked at, so that no number that is none comes from there.
        let k = if self.alpha.is_zero() { 0 } else { k };
        for index in 0..self.batch {
            stop.check()?;
            self.d.check(memory, index, [m, n])?;
            let mut result = match self.beta.is_zero() {
                true => room(m * n)?,
                false => self.c.read(memory, index, [m, n])?,
            };
            let (a, b) = match k {
                0 => (Vec::new(), Vec::new()),
                _ => (self.a.read(memory, index, of_a)?, self.b.read(memory, index, of_b)?),
            };
            let a = Matrix::new(&a[..], strides(&self.a, of_a));
            let b = Matrix::new(&b[..], strides(&self.b, of_b));
            let place = Matrix::new(&mut result[..], [1, m]);
            multiply([m, k, n], (self.alpha, a), b, (self.beta, place), stop)?;
            result.chunks_exact_mut(m).for_each(&mut then);
            self.d.write(memory, index, [m, n], &result)?;
        }
        Ok(())
    }
}

/// Whether the type that is computed in is `f64`; some computations are not done.
pub(crate) fn is_double(compute: i32, kinds: &[Type]) -> Result<bool, Error> {
    let is_double = match compute {
        // CUBLAS_COMPUTE_16F, _32F, _32F_FAST_*, and each _PEDANTIC: all in f32, which has more digits.
        64 | 65 | 68 | 69 | 74 | 75 | 77 => false,
        // CUBLAS_COMPUTE_64F
        70 | 71 => true,
        _ => {
            return Err(Error::NotComputed(
                "a computation other than in 16, 32 or 64 bits of floating point",
            ));
        }
    };
    match kinds.iter().all(|kind| (*kind == Type::F64) == is_double) {
        true => Ok(is_double),
        false => Err(Error::NotComputed("a product of doubles with others")),
    }
}

/// The parts that all of cuBLAS' calls have by the same names.
macro_rules! product {
    ($call:ident, [$a:expr, $b:expr, $c:expr], [$by_a:expr, $by_b:expr, $by_c:expr], $batch:expr) => {{
        let operand = |at, kind, leading, operation, stride| {
            Ok::<_, Error>(Operand {
                at,
                kind,
                leading: count(leading)?,
                is_transposed: is_transposed(operation)?,
                stride,
            })
        };
        let c = operand($call.c, $c, $call.ldc, 0, $by_c)?;
        Product {
            sizes: [count($call.m)?, count($call.k)?, count($call.n)?],
            alpha: scalar(&$call.alpha)?,
            beta: scalar(&$call.beta)?,
            a: operand($call.a, $a, $call.lda, $call.transa, $by_a)?,
            b: operand($call.b, $b, $call.ldb, $call.transb, $by_b)?,
            c,
            d: c,
            batch: count($batch)?,
        }
    }};
}

/// `cublasSgemm_v2`.
pub(crate) fn sgemm(call: &CublasSgemmV2<'_>, memory: &mut Memory, stop: Stop<'_>) -> Result<(), Error> {
    let product: Product<f32> = product!(call, [Type::F32, Type::F32, Type::F32], [0, 0, 0], 1);
    product.carry_out(memory, stop, |_| ())
}

/// `cublasDgemm_v2`.
pub(crate) fn dgemm(call: &CublasDgemmV2<'_>, memory: &mut Memory, stop: Stop<'_>) -> Result<(), Error> {
    let product: Product<f64> = product!(call, [Type::F64, Type::F64, Type::F64], [0, 0, 0], 1);
    product.carry_out(memory, stop, |_| ())
}

/// `cublasSgemmStridedBatched`.
pub(crate) fn sgemm_batched(
    call: &CublasSgemmStridedBatched<'_>,
    memory: &mut Memory,
    stop: Stop<'_>,
) -> Result<(), Error> {
    let strides = [call.stride_a, call.stride_b, call.stride_c];
    let product: Product<f32> = product!(
        call,
        [Type::F32, Type::F32, Type::F32],
        [strides[0], strides[1], strides[2]],
        call.batch_count
    );
    product.carry_out(memory, stop, |_| ())
}

/// `cublasDgemmStridedBatched`.
pub(crate) fn dgemm_batched(
    call: &CublasDgemmStridedBatched<'_>,
    memory: &mut Memory,
    stop: Stop<'_>,
) -> Result<(), Error> {
    let strides = [call.stride_a, call.stride_b, call.stride_c];
    let product: Product<f64> = product!(
        call,
        [Type::F64, Type::F64, Type::F64],
        [strides[0], strides[1], strides[2]],
        call.batch_count
    );
    product.carry_out(memory, stop, |_| ())
}

/// `cublasGemmEx`.
pub(crate) fn gemm_ex(call: &CublasGemmEx<'_>, memory: &mut Memory, stop: Stop<'_>) -> Result<(), Error> {
    let kinds = [
        Type::of_cuda(call.atype)?,
        Type::of_cuda(call.btype)?,
        Type::of_cuda(call.ctype)?,
    ];
    let [a, b, c] = kinds;
    if is_double(call.compute_type, &kinds)? {
        let product: Product<f64> = product!(call, [a, b, c], [0, 0, 0], 1);
        return product.carry_out(memory, stop, |_| ());
    }
    let product: Product<f32> = product!(call, [a, b, c], [0, 0, 0], 1);
    product.carry_out(memory, stop, |_| ())
}

/// `cublasGemmStridedBatchedEx`.
pub(crate) fn gemm_batched_ex(
    call: &CublasGemmStridedBatchedEx<'_>,
    memory: &mut Memory,
    stop: Stop<'_>,
) -> Result<(), Error> {
    let kinds = [
        Type::of_cuda(call.atype)?,
        Type::of_cuda(call.btype)?,
        Type::of_cuda(call.ctype)?,
    ];
    let [a, b, c] = kinds;
    let [by_a, by_b, by_c] = [call.stride_a, call.stride_b, call.stride_c];
    if is_double(call.compute_type, &kinds)? {
        let product: Product<f64> = product!(call, [a, b, c], [by_a, by_b, by_c], call.batch_count);
        return product.carry_out(memory, stop, |_| ());
    }
    let product: Product<f32> = product!(call, [a, b, c], [by_a, by_b, by_c], call.batch_count);
    product.carry_out(memory, stop, |_| ())
}

/// Elements at a distance from each other; from behind where that is negative (BLAS).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Vector {
    pub(crate) at: SvmAddress,
    pub(crate) kind: Type,
    pub(crate) count: usize,
    pub(crate) step: i32,
}

impl Vector {
    fn layout(&self) -> Result<(usize, u64), Error> {
        let step = usize::try_from(self.step.unsigned_abs()).unwrap_or(usize::MAX);
        if step == 0 {
            return Err(Error::Invalid("elements at a distance of zero from each other"));
        }
        let large = || Error::Invalid("a vector that is larger than any memory");
        let last = self.count.saturating_sub(1).checked_mul(step).ok_or_else(large)?;
        let bytes = last
            .checked_add(self.count.min(1))
            .and_then(|span| span.checked_mul(self.kind.bytes()));
        Ok((step, bytes.ok_or_else(large)? as u64))
    }

    /// Whether all of it is in one allocation.
    pub(crate) fn check(&self, memory: &Memory) -> Result<(), Error> {
        memory.bytes(self.at.0, self.layout()?.1)?;
        Ok(())
    }

    pub(crate) fn read<T: Real>(&self, memory: &Memory) -> Result<Vec<T>, Error> {
        let (step, span) = self.layout()?;
        let bytes = memory.bytes(self.at.0, span)?;
        let mut values = room(self.count)?;
        let size = self.kind.bytes();
        for (value, bytes) in values.iter_mut().zip(bytes.chunks(step * size)) {
            T::read(self.kind, &bytes[..size], std::slice::from_mut(value));
        }
        if self.step < 0 {
            values.reverse();
        }
        Ok(values)
    }

    pub(crate) fn write<T: Real>(&self, memory: &mut Memory, mut values: Vec<T>) -> Result<(), Error> {
        let (step, span) = self.layout()?;
        if self.step < 0 {
            values.reverse();
        }
        let bytes = memory.bytes_mut(self.at.0, span)?;
        let size = self.kind.bytes();
        for (value, bytes) in values.iter().zip(bytes.chunks_mut(step * size)) {
            T::write(self.kind, std::slice::from_ref(value), &mut bytes[..size]);
        }
        Ok(())
    }
}

/// A matrix and a vector's product.
struct VectorProduct<'a> {
    operation: i32,
    sizes: [i32; 2],
    matrix: (SvmAddress, i32),
    vectors: [(SvmAddress, i32); 2],
    scalars: [&'a List<'a, u8>; 2],
}

impl VectorProduct<'_> {
    fn carry_out<T: Real>(&self, kind: Type, memory: &mut Memory, stop: Stop<'_>) -> Result<(), Error> {
        let [rows, columns] = [count(self.sizes[0])?, count(self.sizes[1])?];
        let a = Operand {
            at: self.matrix.0,
            kind,
            leading: count(self.matrix.1)?,
            is_transposed: is_transposed(self.operation)?,
            stride: 0,
        };
        a.span([rows, columns.max(1)])?;
        if rows == 0 || columns == 0 {
            return Ok(());
        }
        let (m, k) = if a.is_transposed {
            (columns, rows)
        } else {
            (rows, columns)
        };
        let vector = |(at, step): (SvmAddress, i32), count| Vector { at, kind, count, step };
        let (x, y) = (vector(self.vectors[0], k), vector(self.vectors[1], m));
        let [alpha, beta] = [scalar::<T>(self.scalars[0])?, scalar::<T>(self.scalars[1])?];
        y.check(memory)?;
        let mut result = if beta.is_zero() { room(m)? } else { y.read(memory)? };
        let (matrix, values) = match alpha.is_zero() {
            true => (Vec::new(), Vec::new()),
            false => (a.read(memory, 0, [rows, columns])?, x.read(memory)?),
        };
        let k = if alpha.is_zero() { 0 } else { k };
        let strides = if a.is_transposed { [rows, 1] } else { [1, rows] };
        let matrix = Matrix::new(&matrix[..], strides);
        let place = Matrix::new(&mut result[..], [1, m]);
        multiply(
            [m, k, 1],
            (alpha, matrix),
            Matrix::new(&values[..], [1, k.max(1)]),
            (beta, place),
            stop,
        )?;
        y.write(memory, result)
    }
}

macro_rules! vector_product {
    ($call:ident) => {
        VectorProduct {
            operation: $call.trans,
            sizes: [$call.m, $call.n],
            matrix: ($call.a, $call.lda),
            vectors: [($call.x, $call.incx), ($call.y, $call.incy)],
            scalars: [&$call.alpha, &$call.beta],
        }
    };
}

/// `cublasSgemv_v2`.
pub(crate) fn sgemv(call: &CublasSgemvV2<'_>, memory: &mut Memory, stop: Stop<'_>) -> Result<(), Error> {
    vector_product!(call).carry_out::<f32>(Type::F32, memory, stop)
}

/// `cublasDgemv_v2`.
pub(crate) fn dgemv(call: &CublasDgemvV2<'_>, memory: &mut Memory, stop: Stop<'_>) -> Result<(), Error> {
    vector_product!(call).carry_out::<f64>(Type::F64, memory, stop)
}
