//! cublasLt's products of matrices with descriptors: `D = epilogue(alpha * op(A) * op(B) + beta * C)`.

use accel_proto::cuda::{CublasLtMatmul, CublasLtMatmulAlgoGetHeuristic};
use accel_proto::{List, SvmAddress};

use crate::Error;
use crate::blas::{Operand, Product, is_double, is_transposed};
use crate::descriptor::{Descriptor, long};
use crate::memory::Memory;
use crate::numeric::{Real, Stop, Type};
use crate::tensor::scalar;
use accel_proto::cuda::parts::{
    CUBLAS_LT_MATMUL_DESC_CREATE, CUBLAS_LT_MATMUL_DESC_SET_ATTRIBUTE, CUBLAS_LT_MATRIX_LAYOUT_CREATE,
    CUBLAS_LT_MATRIX_LAYOUT_SET_ATTRIBUTE,
};

/// What is done to each column of the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Epilogue {
    bias: Option<(SvmAddress, Option<Type>)>,
    then: Then,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Then {
    #[default]
    Nothing,
    Relu,
    /// By the hyperbolic tangent, as cublasLt has it.
    Gelu,
}

/// A `cublasLtMatmulDesc_t`.
#[derive(Debug, Clone, Copy)]
struct Description {
    compute: i32,
    transposed: [bool; 2],
    epilogue: Epilogue,
}

/// What an attribute has: its bytes as one number, and how many they are.
fn attribute(words: &[i32]) -> Result<(i32, u64, i32), Error> {
    match *words {
        [attribute, value, 4, 0] => Ok((attribute, long(value, 0), value)),
        [attribute, low, high, 8, 0] => Ok((attribute, long(low, high), low)),
        _ => Err(Error::NotComputed(
            "an attribute of a product that is neither four nor eight bytes long",
        )),
    }
}

impl Description {
    fn of(words: &List<'_, i32>) -> Result<Self, Error> {
        let descriptor = Descriptor::new(words)?;
        let unset = Error::Invalid("a product's descriptor that nothing was put into");
        let &[compute, _] = descriptor.find(CUBLAS_LT_MATMUL_DESC_CREATE).ok_or(unset)? else {
            return Err(Error::Invalid("a product's descriptor of another length"));
        };
        let (mut transposed, mut epilogue) = ([false; 2], 1);
        let (mut bias, mut bias_type) = (SvmAddress::NULL, None);
        for (function, words) in descriptor.all() {
            if function != CUBLAS_LT_MATMUL_DESC_SET_ATTRIBUTE {
                continue;
            }
            // cublasLtMatmulDescAttributes_t
            match attribute(words)? {
                // Where scalars are: they came with the call, so that it is the host.
                (2, _, 0) => {}
                (3, _, operation) => transposed[0] = is_transposed(operation)?,
                (4, _, operation) => transposed[1] = is_transposed(operation)?,
                // Of C nothing but itself is served; the whole of the result; as many processors as there are.
                (5, _, 0) | (6, _, 0) | (15, ..) | (25, ..) => {}
                (7, _, value) => epilogue = value,
                (8, address, _) => bias = SvmAddress(address),
                // -1 is the result's.
                (26, _, -1) => bias_type = None,
                (26, _, value) => bias_type = Some(Type::of_cuda(value)?),
                _ => {
                    return Err(Error::NotComputed(
                        "an attribute of a product other than its operations and epilogue",
                    ));
                }
            }
        }
        let with_bias = Some((bias, bias_type));
        // cublasLtEpilogue_t
        let (bias, then) = match epilogue {
            1 => (None, Then::Nothing),
            2 => (None, Then::Relu),
            4 => (with_bias, Then::Nothing),
            6 => (with_bias, Then::Relu),
            32 => (None, Then::Gelu),
            36 => (with_bias, Then::Gelu),
            _ => return Err(Error::NotComputed("an epilogue other than bias, relu and gelu")),
        };
        Ok(Self {
            compute,
            transposed,
            epilogue: Epilogue { bias, then },
        })
    }
}

/// A `cublasLtMatrixLayout_t`.
#[derive(Debug, Clone, Copy)]
struct Layout {
    kind: Type,
    rows: usize,
    columns: usize,
    leading: usize,
    batch: usize,
    stride: i64,
}

impl Layout {
    fn of(words: &List<'_, i32>) -> Result<Self, Error> {
        let descriptor = Descriptor::new(words)?;
        let unset = Error::Invalid("a matrix' layout that nothing was put into");
        let &[
            kind,
            rows_low,
            rows_high,
            columns_low,
            columns_high,
            leading_low,
            leading_high,
        ] = descriptor.find(CUBLAS_LT_MATRIX_LAYOUT_CREATE).ok_or(unset)?
        else {
            return Err(Error::Invalid("a matrix' layout of another length"));
        };
        let size = |number: u64| {
            let size = u32::try_from(number)
                .ok()
                .and_then(|number| usize::try_from(number).ok());
            size.ok_or(Error::Invalid("a matrix that is larger than any memory"))
        };
        let mut layout = Self {
            kind: Type::of_cuda(kind)?,
            rows: size(long(rows_low, rows_high))?,
            columns: size(long(columns_low, columns_high))?,
            leading: size(long(leading_low, leading_high))?,
            batch: 1,
            stride: 0,
        };
        for (function, words) in descriptor.all() {
            if function != CUBLAS_LT_MATRIX_LAYOUT_SET_ATTRIBUTE {
                continue;
            }
            // cublasLtMatrixLayoutAttribute_t
            match attribute(words)? {
                (0, _, kind) => layout.kind = Type::of_cuda(kind)?,
                // CUBLASLT_ORDER_COL
                (1, _, 0) => {}
                (2, rows, _) => layout.rows = size(rows)?,
                (3, columns, _) => layout.columns = size(columns)?,
                (4, leading, _) => layout.leading = size(leading)?,
                (5, batch, _) => layout.batch = size(batch)?,
                (6, stride, _) => layout.stride = stride.cast_signed(),
                _ => return Err(Error::NotComputed("a matrix' layout other than columns")),
            }
        }
        Ok(layout)
    }

    fn operand(&self, at: SvmAddress, is_transposed: bool) -> Operand {
        Operand {
            at,
            kind: self.kind,
            leading: self.leading,
            is_transposed,
            stride: self.stride,
        }
    }
}

/// A product as its descriptors say.
#[derive(Debug, Clone, Copy)]
struct Matmul {
    description: Description,
    layouts: [Layout; 4],
    sizes: [usize; 3],
    is_double: bool,
}

impl Matmul {
    fn of(description: &List<'_, i32>, layouts: [&List<'_, i32>; 4]) -> Result<Self, Error> {
        let description = Description::of(description)?;
        let [a, b, c, d] = layouts.map(Layout::of);
        let layouts = [a?, b?, c?, d?];
        let [a, b, c, d] = &layouts;
        let turned = |layout: &Layout, is_transposed: bool| {
            if is_transposed {
                [layout.columns, layout.rows]
            } else {
                [layout.rows, layout.columns]
            }
        };
        let ([m, k], [of_b, n]) = (
            turned(a, description.transposed[0]),
            turned(b, description.transposed[1]),
        );
        let fits = k == of_b && [c, d].iter().all(|layout| [layout.rows, layout.columns] == [m, n]);
        if !fits || layouts.iter().any(|layout| layout.batch != a.batch) {
            return Err(Error::Invalid("matrices whose sizes do not fit together"));
        }
        let is_double = is_double(description.compute, &layouts.map(|layout| layout.kind))?;
        Ok(Self {
            description,
            layouts,
            sizes: [m, k, n],
            is_double,
        })
    }

    fn carry_out<T: Real>(&self, call: &CublasLtMatmul<'_>, memory: &mut Memory, stop: Stop<'_>) -> Result<(), Error> {
        let [a, b, c, d] = &self.layouts;
        let epilogue = self.description.epilogue;
        let bias = epilogue.bias.map(|(at, kind)| {
            let operand = Operand {
                kind: kind.unwrap_or(d.kind),
                leading: self.sizes[0].max(1),
                ..d.operand(at, false)
            };
            operand.read::<T>(memory, 0, [self.sizes[0], 1])
        });
        let bias = bias.transpose()?;
        let product = Product {
            sizes: self.sizes,
            alpha: scalar::<T>(&call.alpha)?,
            beta: scalar(&call.beta)?,
            a: a.operand(call.a, self.description.transposed[0]),
            b: b.operand(call.b, self.description.transposed[1]),
            c: c.operand(call.c, false),
            d: d.operand(call.d, false),
            batch: a.batch,
        };
        product.carry_out(memory, stop, |column| {
            if let Some(bias) = &bias {
                column.iter_mut().zip(bias).for_each(|(value, bias)| *value += *bias);
            }
            match epilogue.then {
                Then::Nothing => {}
                Then::Relu => column
                    .iter_mut()
                    .filter(|value| **value < T::default())
                    .for_each(|value| *value = T::default()),
                Then::Gelu => column.iter_mut().for_each(|value| *value = T::of(gelu(value.wide()))),
            }
        })
    }
}

/// `x * P(X <= x)` of a normal X, by the approximation that has a hyperbolic tangent (Hendrycks and Gimpel, 2016).
pub(crate) fn gelu(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
    0.5 * x * (1.0 + inner.tanh())
}

/// `cublasLtMatmul`.
pub(crate) fn matmul(call: &CublasLtMatmul<'_>, memory: &mut Memory, stop: Stop<'_>) -> Result<(), Error> {
    let matmul = Matmul::of(&call.compute_desc, [&call.adesc, &call.bdesc, &call.cdesc, &call.ddesc])?;
    match matmul.is_double {
        true => matmul.carry_out::<f64>(call, memory, stop),
        false => matmul.carry_out::<f32>(call, memory, stop),
    }
}

/// Whether `cublasLtMatmul` would compute what an algorithm is asked for.
pub(crate) fn check(call: &CublasLtMatmulAlgoGetHeuristic<'_>) -> Result<(), Error> {
    Matmul::of(
        &call.operation_desc,
        [&call.adesc, &call.bdesc, &call.cdesc, &call.ddesc],
    )
    .map(drop)
}
