//! Words of the instruction set: types, state spaces, roundings, comparisons. Knows no instruction.

/// A type as PTX names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Type {
    Pred,
    B8,
    B16,
    B32,
    B64,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    F32,
    F64,
}

impl Type {
    pub(crate) fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "pred" => Self::Pred,
            "b8" => Self::B8,
            "b16" => Self::B16,
            "b32" => Self::B32,
            "b64" => Self::B64,
            "u8" => Self::U8,
            "u16" => Self::U16,
            "u32" => Self::U32,
            "u64" => Self::U64,
            "s8" => Self::S8,
            "s16" => Self::S16,
            "s32" => Self::S32,
            "s64" => Self::S64,
            "f16" => Self::F16,
            "f16x2" => Self::F16x2,
            "bf16" => Self::Bf16,
            "bf16x2" => Self::Bf16x2,
            "f32" => Self::F32,
            "f64" => Self::F64,
            _ => return None,
        })
    }

    pub(crate) const fn bytes(self) -> u32 {
        match self {
            Self::Pred | Self::B8 | Self::U8 | Self::S8 => 1,
            Self::B16 | Self::U16 | Self::S16 | Self::F16 | Self::Bf16 => 2,
            Self::B32 | Self::U32 | Self::S32 | Self::F32 | Self::F16x2 | Self::Bf16x2 => 4,
            Self::B64 | Self::U64 | Self::S64 | Self::F64 => 8,
        }
    }

    pub(crate) const fn is_signed(self) -> bool {
        matches!(self, Self::S8 | Self::S16 | Self::S32 | Self::S64)
    }

    pub(crate) const fn is_float(self) -> bool {
        matches!(
            self,
            Self::F16 | Self::F16x2 | Self::Bf16 | Self::Bf16x2 | Self::F32 | Self::F64
        )
    }

    /// Two values in one register.
    pub(crate) const fn is_packed(self) -> bool {
        matches!(self, Self::F16x2 | Self::Bf16x2)
    }
}

/// A state space. Constants are global memory here, and so are global variables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    Generic,
    Global,
    Shared,
    Local,
    /// The kernel's parameters.
    Param,
}

impl Space {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Generic | Self::Global => "global memory",
            Self::Shared => "shared memory",
            Self::Local => "local memory",
            Self::Param => "kernel parameters",
        }
    }
}

/// How a result that no number of the type is becomes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rounding {
    Nearest,
    Zero,
    Down,
    Up,
}

/// What a comparison asks; the second of a pair is true for NaN, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    Equ,
    Neu,
    Ltu,
    Leu,
    Gtu,
    Geu,
    Num,
    Nan,
}

impl Compare {
    pub(crate) fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "eq" => Self::Eq,
            "ne" => Self::Ne,
            "lt" | "lo" => Self::Lt,
            "le" | "ls" => Self::Le,
            "gt" | "hi" => Self::Gt,
            "ge" | "hs" => Self::Ge,
            "equ" => Self::Equ,
            "neu" => Self::Neu,
            "ltu" => Self::Ltu,
            "leu" => Self::Leu,
            "gtu" => Self::Gtu,
            "geu" => Self::Geu,
            "num" => Self::Num,
            "nan" => Self::Nan,
            _ => return None,
        })
    }

    /// The answer for two numbers that compare as `ordering`, or do not compare because one is no number.
    pub(crate) const fn holds(self, ordering: Option<std::cmp::Ordering>) -> bool {
        use std::cmp::Ordering::{Equal, Greater, Less};
        match (self, ordering) {
            (Self::Equ | Self::Neu | Self::Ltu | Self::Leu | Self::Gtu | Self::Geu | Self::Nan, None) => true,
            (_, None) | (Self::Nan, Some(_)) => false,
            (Self::Num, Some(_)) => true,
            (Self::Eq | Self::Equ, Some(order)) => matches!(order, Equal),
            (Self::Ne | Self::Neu, Some(order)) => !matches!(order, Equal),
            (Self::Lt | Self::Ltu, Some(order)) => matches!(order, Less),
            (Self::Le | Self::Leu, Some(order)) => !matches!(order, Greater),
            (Self::Gt | Self::Gtu, Some(order)) => matches!(order, Greater),
            (Self::Ge | Self::Geu, Some(order)) => !matches!(order, Less),
        }
    }
}

/// How a comparison's answer is put together with a predicate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Boolean {
    And,
    Or,
    Xor,
}

impl Boolean {
    pub(crate) fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "and" => Self::And,
            "or" => Self::Or,
            "xor" => Self::Xor,
            _ => return None,
        })
    }
}
