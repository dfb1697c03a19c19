//! Instructions that load or store what is no memory of the guest: which register or value, how wide, how long the instruction
//! is (AMD64 Architecture Programmer's Manual, volume 3, chapters 1 and 3). Where the access goes the processor has said, so that no
//! address is reckoned here. Only moves are known: those by which kernels reach devices. Pure numbers.

/// The longest instruction (volume 3, 1.1).
pub(crate) const LONGEST: usize = 15;

/// How operands and addresses are wide unless a prefix says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Real mode, and code segments of 16 bits.
    Bits16,
    /// Code segments of 32 bits.
    Bits32,
    /// 64-bit mode.
    Bits64,
}

/// A general register, or a part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Register {
    /// By its number in instruction encodings.
    pub(crate) number: usize,
    /// Bits 8 to 15 of it (AH, CH, DH, BH).
    pub(crate) high: bool,
}

/// What an instruction does with what it accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// Loads it to a register, of which `width` bytes are written (and the upper half cleared, if it is 4), with its sign if `signed`.
    Load {
        /// Where to.
        to: Register,
        /// Bytes that are written there.
        width: usize,
        /// Whether the sign is kept where that is wider than the access.
        signed: bool,
    },
    /// Stores a register.
    Store(Register),
    /// Stores a value.
    StoreValue(u64),
}

/// One access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Access {
    /// Bytes of the instruction.
    pub(crate) length: usize,
    /// Bytes of the access: 1, 2, 4 or 8.
    pub(crate) size: usize,
    /// What is done.
    pub(crate) what: What,
}

/// Prefixes that matter here.
#[derive(Clone, Copy, Default)]
struct Prefixes {
    operand: bool,
    address: bool,
    /// REX, with its upper half; 0 where there is none.
    rex: u8,
}

struct Bytes<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Bytes<'_> {
    fn next(&mut self) -> Option<u8> {
        let byte = *self.bytes.get(self.at)?;
        self.at += 1;
        (self.at <= LONGEST).then_some(byte)
    }

    fn skip(&mut self, count: usize) -> Option<()> {
        (0..count).try_for_each(|_| self.next().map(drop))
    }

    /// So many bytes, the lowest first, with the last one's sign.
    fn signed(&mut self, count: usize) -> Option<u64> {
        let mut value = 0;
        for index in 0..count {
            value |= u64::from(self.next()?) << (8 * index);
        }
        Some(extend(value, count))
    }
}

/// A value of so many bytes with its sign.
pub(crate) fn extend(value: u64, bytes: usize) -> u64 {
    let unused = 64 - 8 * bytes.clamp(1, 8);
    ((value << unused).cast_signed() >> unused).cast_unsigned()
}

/// The access that the instruction makes with which `bytes` begin; `None` if it is none that is known.
pub(crate) fn decode(bytes: &[u8], mode: Mode) -> Option<Access> {
    let mut bytes = Bytes { bytes, at: 0 };
    let mut prefixes = Prefixes::default();
    let opcode = loop {
        match bytes.next()? {
            0x66 => prefixes.operand = true,
            0x67 => prefixes.address = true,
            // Segments change the address only; without a repeat they mean nothing here.
            0x26 | 0x2e | 0x36 | 0x3e | 0x64 | 0x65 => (),
            rex @ 0x40..=0x4f if mode == Mode::Bits64 => {
                prefixes.rex = rex;
                // Anything between it and the opcode would make it mean nothing.
                break bytes.next()?;
            }
            other => break other,
        }
    };
    let wide = prefixes.rex & 8 != 0;
    let operand = match (mode, prefixes.operand) {
        (Mode::Bits64, _) if wide => 8,
        (Mode::Bits16, false) | (Mode::Bits32 | Mode::Bits64, true) => 2,
        (Mode::Bits16, true) | (Mode::Bits32 | Mode::Bits64, false) => 4,
    };
    let (size, what) = match opcode {
        0x88 | 0x89 => {
            let size = if opcode == 0x88 { 1 } else { operand };
            let reg = modrm(&mut bytes, mode, prefixes)?;
            (size, What::Store(register(reg, size, prefixes)))
        }
        0x8a | 0x8b => {
            let size = if opcode == 0x8a { 1 } else { operand };
            let reg = modrm(&mut bytes, mode, prefixes)?;
            (size, load(register(reg, size, prefixes), size, false))
        }
        0xc6 | 0xc7 => {
            let size = if opcode == 0xc6 { 1 } else { operand };
            // Other numbers there are other instructions.
            if modrm(&mut bytes, mode, prefixes)? & 7 != 0 {
                return None;
            }
            (size, What::StoreValue(bytes.signed(size.min(4))?))
        }
        0xa0..=0xa3 => {
            let size = if opcode & 1 == 0 { 1 } else { operand };
            bytes.skip(address_bytes(mode, prefixes))?;
            let accumulator = register(0, size, prefixes);
            let what = match opcode {
                0xa0 | 0xa1 => load(accumulator, size, false),
                _ => What::Store(accumulator),
            };
            (size, what)
        }
        0x63 if mode == Mode::Bits64 => {
            let reg = modrm(&mut bytes, mode, prefixes)?;
            (4, load(register(reg, operand, prefixes), operand, true))
        }
        0x0f => match bytes.next()? {
            extended @ (0xb6 | 0xb7 | 0xbe | 0xbf) => {
                let size = if extended & 1 == 0 { 1 } else { 2 };
                let reg = modrm(&mut bytes, mode, prefixes)?;
                // What is written is never a part of 8 bits, so that number 4 is RSP and not AH.
                let to = register(reg, operand, prefixes);
                (size, load(to, operand, extended >= 0xbe))
            }
            _ => return None,
        },
        _ => return None,
    };
    Some(Access {
        length: bytes.at,
        size,
        what,
    })
}

fn load(to: Register, width: usize, signed: bool) -> What {
    What::Load { to, width, signed }
}

fn register(reg: u8, size: usize, prefixes: Prefixes) -> Register {
    // Without REX the numbers 4 to 7 are the second bytes of the first four (volume 3, 1.4.2).
    if size == 1 && prefixes.rex == 0 && (4..8).contains(&reg) {
        return Register {
            number: usize::from(reg - 4),
            high: true,
        };
    }
    Register {
        number: usize::from(reg),
        high: false,
    }
}

fn address_bytes(mode: Mode, prefixes: Prefixes) -> usize {
    match (mode, prefixes.address) {
        (Mode::Bits64, false) => 8,
        (Mode::Bits64, true) | (Mode::Bits32, false) | (Mode::Bits16, true) => 4,
        (Mode::Bits32, true) | (Mode::Bits16, false) => 2,
    }
}

/// Takes ModRM, SIB and displacement; the number in ModRM's middle, with REX's bit. `None` where no memory is meant.
fn modrm(bytes: &mut Bytes<'_>, mode: Mode, prefixes: Prefixes) -> Option<u8> {
    let modrm = bytes.next()?;
    let (kind, middle, last) = (modrm >> 6, (modrm >> 3) & 7, modrm & 7);
    if kind == 3 {
        return None;
    }
    let displacement = if address_bytes(mode, prefixes) == 2 {
        match (kind, last) {
            (0, 6) | (2, _) => 2,
            (0, _) => 0,
            _ => 1,
        }
    } else {
        let base = if last == 4 { bytes.next()? & 7 } else { last };
        match (kind, base) {
            (0, 5) | (2, _) => 4,
            (0, _) => 0,
            _ => 1,
        }
    };
    bytes.skip(displacement)?;
    Some(middle | (prefixes.rex & 4) << 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAX: Register = Register { number: 0, high: false };
    const RCX: Register = Register { number: 1, high: false };

    fn long(bytes: &[u8]) -> Option<Access> {
        decode(bytes, Mode::Bits64)
    }

    fn access(length: usize, size: usize, what: What) -> Option<Access> {
        Some(Access { length, size, what })
    }

    #[test]
    fn moves_of_a_kernel_are_known() {
        // mov eax, [rdi]; mov [rdi], eax
        assert_eq!(long(&[0x8b, 0x07, 0x90]), access(2, 4, load(RAX, 4, false)));
        assert_eq!(long(&[0x89, 0x07]), access(2, 4, What::Store(RAX)));
        // mov rax, [r8 + 8]; mov ax, [rsi]; mov al, [rsi]
        assert_eq!(long(&[0x49, 0x8b, 0x40, 0x08]), access(4, 8, load(RAX, 8, false)));
        assert_eq!(long(&[0x66, 0x8b, 0x06]), access(3, 2, load(RAX, 2, false)));
        assert_eq!(long(&[0x8a, 0x06]), access(2, 1, load(RAX, 1, false)));
        // movzx ecx, byte [rax + rcx * 1 + 0x100]; movsx rcx, word [rax]
        let bytes = [0x0f, 0xb6, 0x8c, 0x08, 0, 1, 0, 0];
        assert_eq!(long(&bytes), access(8, 1, load(RCX, 4, false)));
        assert_eq!(long(&[0x48, 0x0f, 0xbf, 0x08]), access(4, 2, load(RCX, 8, true)));
        // movsxd rcx, dword [rax]
        assert_eq!(long(&[0x48, 0x63, 0x08]), access(3, 4, load(RCX, 8, true)));
        // mov dword [rip + 4], 1; mov qword [rax], -1; mov word [rax], 0x1234; mov byte [rax], 0xff
        let bytes = [0xc7, 0x05, 4, 0, 0, 0, 1, 0, 0, 0];
        assert_eq!(long(&bytes), access(10, 4, What::StoreValue(1)));
        let bytes = [0x48, 0xc7, 0x00, 0xff, 0xff, 0xff, 0xff];
        assert_eq!(long(&bytes), access(7, 8, What::StoreValue(u64::MAX)));
        assert_eq!(
            long(&[0x66, 0xc7, 0x00, 0x34, 0x12]),
            access(5, 2, What::StoreValue(0x1234))
        );
        assert_eq!(long(&[0xc6, 0x00, 0xff]), access(3, 1, What::StoreValue(u64::MAX)));
        // mov eax, [moffs]
        let bytes = [0xa1, 0, 0, 0, 0xe0, 0, 0, 0, 0];
        assert_eq!(long(&bytes), access(9, 4, load(RAX, 4, false)));
    }

    #[test]
    fn parts_of_registers_are_told_apart() {
        let high = Register { number: 0, high: true };
        let rsp = Register { number: 4, high: false };
        let r12 = Register {
            number: 12,
            high: false,
        };
        // mov [rax], ah; mov [rax], spl; mov [rax], r12b
        assert_eq!(long(&[0x88, 0x20]), access(2, 1, What::Store(high)));
        assert_eq!(long(&[0x40, 0x88, 0x20]), access(3, 1, What::Store(rsp)));
        assert_eq!(long(&[0x44, 0x88, 0x20]), access(3, 1, What::Store(r12)));
        // movzx esp, byte [rax]
        assert_eq!(long(&[0x0f, 0xb6, 0x20]), access(3, 1, load(rsp, 4, false)));
    }

    #[test]
    fn narrower_modes_have_other_widths() {
        // mov ax, [0x1234]; mov eax, [bx]; mov eax, [ecx]
        let sixteen = decode(&[0x8b, 0x06, 0x34, 0x12], Mode::Bits16);
        assert_eq!(sixteen, access(4, 2, load(RAX, 2, false)));
        let sixteen = decode(&[0x66, 0x8b, 0x07], Mode::Bits16);
        assert_eq!(sixteen, access(3, 4, load(RAX, 4, false)));
        let thirty_two = decode(&[0x8b, 0x01], Mode::Bits32);
        assert_eq!(thirty_two, access(2, 4, load(RAX, 4, false)));
        let moffs = decode(&[0xa1, 0, 0, 0, 0xe0, 0x90], Mode::Bits32);
        assert_eq!(moffs, access(5, 4, load(RAX, 4, false)));
    }

    #[test]
    fn what_is_not_known_or_not_whole_is_refused() {
        // Between registers; add; cut short; a prefix behind REX; too long; not /0.
        for bytes in [
            &[0x89, 0xc0][..],
            &[0x01, 0x07],
            &[0x8b],
            &[0x8b, 0x05, 0, 0],
            &[0x48, 0x66, 0x8b, 0x07],
            &[0x66; 20],
            &[0xc7, 0x08, 1, 0, 0, 0],
            &[0x0f, 0x05],
            &[],
        ] {
            assert_eq!(long(bytes), None, "{bytes:x?}");
        }
        let mut longest = vec![0x66; 13];
        longest.extend([0x8b, 0x07]);
        assert_eq!(long(&longest).map(|access| access.length), Some(15));
        longest.insert(0, 0x66);
        assert_eq!(long(&longest), None, "one byte more than an instruction can have");
    }

    #[test]
    fn signs_are_extended() {
        assert_eq!(extend(0x80, 1), 0xffff_ffff_ffff_ff80);
        assert_eq!(extend(0x7f, 1), 0x7f);
        assert_eq!(extend(0x8000_0000, 4), 0xffff_ffff_8000_0000);
        assert_eq!(extend(u64::MAX, 8), u64::MAX);
    }
}
