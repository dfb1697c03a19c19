//! Instructions as they are carried out: registers are indices, names are gone. Knows neither text nor execution.

use crate::types::{Boolean, Compare, Rounding, Space, Type};

/// A register of a function's frame, predicates among them.
pub(crate) type Reg = u32;

/// No register: a result that nobody wants.
pub(crate) const NOWHERE: Reg = Reg::MAX;

/// Where an operand comes from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Src {
    Reg(Reg),
    Imm(u64),
    Special(Special),
    /// The address of a variable in global memory, known when the module is loaded.
    Symbol(u32),
    /// An offset in the local memory of the function's frame.
    Local(u32),
    /// An offset in what the module's functions share, which lies behind what the kernel has for itself.
    Shared(u32),
    /// Where the shared memory begins whose size the launch says.
    Dynamic,
}

/// What a thread can ask about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    Lane,
    Warp,
    Warps,
    MaskEq,
    MaskLe,
    MaskLt,
    MaskGe,
    MaskGt,
    Clock,
    DynamicShared,
    TotalShared,
    Zero,
    One,
    WarpSize,
}

/// A predicate, or the opposite of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pred {
    pub(crate) reg: Reg,
    pub(crate) not: bool,
}

/// Integers by width and sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Int {
    U16,
    U32,
    U64,
    S16,
    S32,
    S64,
}

impl Int {
    pub(crate) const fn of(t: Type) -> Option<Self> {
        Some(match t {
            Type::U16 | Type::B16 => Self::U16,
            Type::S16 => Self::S16,
            Type::U32 | Type::B32 => Self::U32,
            Type::S32 => Self::S32,
            Type::U64 | Type::B64 => Self::U64,
            Type::S64 => Self::S64,
            _ => return None,
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Int1 {
    Neg,
    Abs,
    Not,
    Cnot,
    Popc,
    Clz,
    Brev,
    Bfind,
    BfindShift,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Int2 {
    Add,
    AddSat,
    Sub,
    SubSat,
    MulLo,
    MulHi,
    MulWide,
    Mul24Lo,
    Div,
    Rem,
    Min,
    Max,
    And,
    Or,
    Xor,
    Shl,
    Shr,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Int3 {
    MadLo,
    MadHi,
    MadHiSat,
    MadWide,
    Sad,
    Bfe,
    Dp4aSS,
    Dp4aSU,
    Dp4aUS,
    Dp4aUU,
    ShfLeftWrap,
    ShfLeftClamp,
    ShfRightWrap,
    ShfRightClamp,
    Prmt,
    PrmtF4e,
    PrmtB4e,
    PrmtRc8,
    PrmtEcl,
    PrmtEcr,
    PrmtRc16,
    Lop3(u8),
}

/// Sums with the carry flag: whether it is read and whether it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Carry {
    pub(crate) reads: bool,
    pub(crate) writes: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Float1 {
    Neg,
    Abs,
    Sqrt,
    Rcp,
    Rsqrt,
    Sin,
    Cos,
    Ex2,
    Lg2,
    Tanh,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Float2 {
    Add,
    Sub,
    Mul,
    Div,
    Min,
    Max,
    MinNan,
    MaxNan,
    Copysign,
}

/// How a floating-point instruction treats its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mode {
    pub(crate) t: Type,
    pub(crate) rounding: Rounding,
    /// Subnormal binary32 numbers are zero.
    pub(crate) ftz: bool,
    /// The result is clamped to 0 to 1.
    pub(crate) sat: bool,
    /// Negative results become zero (`fma.relu`).
    pub(crate) relu: bool,
}

/// A conversion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Convert {
    pub(crate) to: Type,
    pub(crate) from: Type,
    /// To a whole number, whatever type it is in.
    pub(crate) whole: bool,
    pub(crate) rounding: Rounding,
    pub(crate) ftz: bool,
    pub(crate) sat: bool,
    pub(crate) relu: bool,
}

/// An address: a base and what is added.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Address {
    pub(crate) base: Src,
    pub(crate) offset: i64,
}

/// What an atomic access makes of what is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Atomic {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exch,
    Cas,
    Inc,
    Dec,
}

/// What a warp's threads do together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Together {
    ShflUp,
    ShflDown,
    ShflBfly,
    ShflIdx,
    VoteAll,
    VoteAny,
    VoteUni,
    Ballot,
    MatchAny(Type),
    MatchAll(Type),
    ReduceAdd,
    ReduceMin(Int),
    ReduceMax(Int),
    ReduceAnd,
    ReduceOr,
    ReduceXor,
    Sync,
}

/// An instruction of a warp's threads together; unused operands are immediate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Collective {
    pub(crate) what: Together,
    pub(crate) d: Reg,
    /// A predicate that is written, too.
    pub(crate) p: Reg,
    pub(crate) a: Src,
    pub(crate) b: Src,
    pub(crate) c: Src,
    /// A predicate that is read.
    pub(crate) q: Pred,
    pub(crate) mask: Src,
}

/// What a barrier tells of the threads that reached it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Barrier {
    Sync,
    Arrive,
    Popc,
    And,
    Or,
}

/// A barrier of a block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Bar {
    pub(crate) kind: Barrier,
    pub(crate) id: Src,
    /// How many threads; none: all that have not ended.
    pub(crate) count: Option<Src>,
    pub(crate) d: Reg,
    pub(crate) q: Pred,
}

/// A call of a function of the module: bytes are copied from the caller's frame into the callee's, and back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CallSite {
    pub(crate) caller: u32,
    pub(crate) function: u32,
    /// The caller's offset of each argument.
    pub(crate) arguments: Vec<u32>,
    pub(crate) results: Vec<u32>,
}

/// A load or store.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Access {
    pub(crate) space: Space,
    pub(crate) t: Type,
    pub(crate) count: u8,
    pub(crate) address: Address,
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Op {
    Nop,
    Mov {
        d: Reg,
        a: Src,
    },
    Int1 {
        f: Int1,
        t: Int,
        d: Reg,
        a: Src,
    },
    Int2 {
        f: Int2,
        t: Int,
        d: Reg,
        a: Src,
        b: Src,
    },
    Int3 {
        f: Int3,
        t: Int,
        d: Reg,
        a: Src,
        b: Src,
        c: Src,
    },
    Bfi {
        t: Int,
        d: Reg,
        operands: u32,
    },
    AddCarry {
        carry: Carry,
        subtract: bool,
        t: Int,
        d: Reg,
        a: Src,
        b: Src,
    },
    MadCarry {
        carry: Carry,
        high: bool,
        t: Int,
        d: Reg,
        operands: u32,
    },
    Float1 {
        f: Float1,
        m: Mode,
        d: Reg,
        a: Src,
    },
    Float2 {
        f: Float2,
        m: Mode,
        d: Reg,
        a: Src,
        b: Src,
    },
    Fma {
        m: Mode,
        d: Reg,
        a: Src,
        b: Src,
        c: Src,
    },
    Testp {
        kind: Testp,
        t: Type,
        d: Reg,
        a: Src,
    },
    Setp {
        cmp: Compare,
        t: Type,
        ftz: bool,
        join: Option<(Boolean, Pred)>,
        d: Reg,
        q: Reg,
        a: Src,
        b: Src,
    },
    Set {
        cmp: Compare,
        t: Type,
        to: Type,
        ftz: bool,
        d: Reg,
        a: Src,
        b: Src,
    },
    Preds {
        f: Boolean,
        d: Reg,
        a: Pred,
        b: Pred,
    },
    PredMov {
        d: Reg,
        a: Pred,
    },
    PredImm {
        d: Reg,
        value: bool,
    },
    Selp {
        d: Reg,
        a: Src,
        b: Src,
        p: Pred,
    },
    Slct {
        t: Type,
        d: Reg,
        a: Src,
        b: Src,
        c: Src,
    },
    Cvt {
        c: Convert,
        d: Reg,
        a: Src,
    },
    /// Two binary32 into one register of two halves; `a` is the upper.
    CvtPair {
        c: Convert,
        d: Reg,
        a: Src,
        b: Src,
    },
    /// Several registers into one, `bits` each; the list is in the program's side table.
    Pack {
        d: Reg,
        bits: u8,
        count: u8,
        operands: u32,
    },
    Unpack {
        bits: u8,
        count: u8,
        targets: u32,
        a: Src,
    },
    Isspacep {
        space: Space,
        d: Reg,
        a: Src,
    },
    Load {
        access: Access,
        targets: u32,
    },
    /// A load of one value, which is the most frequent.
    Load1 {
        access: Access,
        d: Reg,
    },
    Store {
        access: Access,
        operands: u32,
    },
    Atomic {
        f: Atomic,
        space: Space,
        t: Type,
        d: Reg,
        address: Address,
        operands: u32,
    },
    Bra {
        target: u32,
    },
    BraIdx {
        table: u32,
        a: Src,
    },
    Call {
        site: u32,
    },
    Ret,
    Exit,
    Trap,
    AssertFail,
    ActiveMask {
        d: Reg,
    },
    Bar {
        bar: u32,
    },
    Together {
        collective: u32,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Testp {
    Finite,
    Infinite,
    Number,
    NotANumber,
    Normal,
    Subnormal,
}

/// An instruction with its guard and its line.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Inst {
    pub(crate) op: Op,
    /// Without one, [`NOWHERE`].
    pub(crate) guard: Pred,
    pub(crate) line: u32,
}

/// Instructions of all functions, and what they refer to.
#[derive(Debug, Clone, Default)]
pub(crate) struct Code {
    pub(crate) insts: Vec<Inst>,
    /// Operands of what has many.
    pub(crate) operands: Vec<Src>,
    /// Registers that what has many results writes.
    pub(crate) targets: Vec<Reg>,
    pub(crate) tables: Vec<Vec<u32>>,
    pub(crate) calls: Vec<CallSite>,
    pub(crate) bars: Vec<Bar>,
    pub(crate) collectives: Vec<Collective>,
}
