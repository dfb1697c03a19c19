//! PTX written by hand: instructions that nvcc seldom makes, one by one, and what is refused.

#![expect(
    clippy::cast_possible_truncation,
    reason = "what the tests compute anew is conversions"
)]

use accel_ptx::{LaunchError, Program, Refused};

use crate::device::{Args, Device};

/// Runs `body` in one thread with four numbers in `%a0` to `%a3`; what it leaves in `%q` and `%o`.
#[track_caller]
fn eval(body: &str, inputs: [u64; 4]) -> (u64, u64) {
    let text = format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n\
         .visible .entry k(.param .u64 in, .param .u64 out)\n{{\n\
         .reg .b64 %a<4>, %in, %out, %q, %o, %d<8>;\n.reg .b32 %r<16>;\n.reg .b16 %h<8>;\n.reg .pred %p<8>;\n.shared .align 8 .b8 room[64];\n\
         ld.param.u64 %in, [in];\nld.param.u64 %out, [out];\nmov.u64 %q, 0;\nmov.u64 %o, 0;\n\
         ld.global.v2.u64 {{%a0, %a1}}, [%in];\nld.global.v2.u64 {{%a2, %a3}}, [%in+16];\n\
         cvt.u32.u64 %r0, %a0;\ncvt.u32.u64 %r1, %a1;\ncvt.u32.u64 %r2, %a2;\ncvt.u32.u64 %r3, %a3;\n\
         cvt.u16.u64 %h0, %a0;\ncvt.u16.u64 %h1, %a1;\ncvt.u16.u64 %h2, %a2;\n\
         {body}\n\
         st.global.v2.u64 [%out], {{%q, %o}};\nret;\n}}\n"
    );
    let mut device = Device::new(&text);
    let (input, out) = (device.upload(&inputs), device.upload(&[0u64; 2]));
    let args = Args::new().pointer(input).pointer(out);
    device.run("k", 1, 1, &args);
    let found = device.download::<u64>(out, 2);
    (found[0], found[1])
}

/// One instruction of 32 bits: its result.
#[track_caller]
fn word(instruction: &str, inputs: [u32; 3]) -> u32 {
    let body = format!("{instruction} %r9, %r0, %r1, %r2;\ncvt.u64.u32 %q, %r9;");
    let (q, _) = eval(&body, [inputs[0].into(), inputs[1].into(), inputs[2].into(), 0]);
    u32::try_from(q).unwrap()
}

#[test]
fn fields_of_bits_are_taken_out_and_put_in() {
    for (instruction, inputs, wanted) in [
        ("bfe.u32", [0xdead_beef, 8, 16], 0xadbe),
        ("bfe.s32", [0xdead_beef, 8, 16], 0xffff_adbe),
        ("bfe.s32", [0x8000_0000, 28, 20], 0xffff_fff8),
        ("bfe.u32", [0x8000_0000, 28, 20], 8),
        ("bfe.u32", [0xffff_ffff, 40, 4], 0),
        ("bfe.s32", [0xffff_ffff, 4, 0], 0),
    ] {
        assert_eq!(word(instruction, inputs), wanted, "{instruction} {inputs:x?}");
    }
    let insert = |at, length| {
        let body = format!(
            "bfi.b32 %r9, %r0, %r1, {at}, {length};\ncvt.u64.u32 %q, %r9;\nbfi.b64 %o, %a0, %a1, {at}, {length};"
        );
        eval(&body, [0xffff_fff5, 0x1234_5678, 0, 0])
    };
    assert_eq!(insert(4, 8), (0x1234_5f58, 0x1234_5f58));
    assert_eq!(insert(28, 20), (0x5234_5678, 0xffff_5234_5678));
    assert_eq!(insert(40, 4), (0x1234_5678, 0x0500_1234_5678));
}

#[test]
fn bytes_are_permuted_in_all_modes() {
    let (a, b) = (0x3322_1100, 0x7766_5544);
    for (instruction, selector, wanted) in [
        ("prmt.b32", 0x7410, 0x7744_1100),
        ("prmt.b32", 0xf012, 0x0000_1122),
        ("prmt.b32.f4e", 1, 0x4433_2211),
        ("prmt.b32.b4e", 1, 0x6677_0011),
        ("prmt.b32.rc8", 2, 0x2222_2222),
        ("prmt.b32.ecl", 1, 0x3322_1111),
        ("prmt.b32.ecr", 1, 0x1111_1100),
        ("prmt.b32.rc16", 1, 0x3322_3322),
    ] {
        assert_eq!(
            word(instruction, [a, b, selector]),
            wanted,
            "{instruction} {selector:x}"
        );
    }
    assert_eq!(word("prmt.b32", [0x80, 0, 0x8888]), 0xffff_ffff, "signs");
}

#[test]
fn three_input_logic_is_its_table() {
    let (a, b, c) = (0xf0f0_1234u32, 0xcccc_5678, 0xaaaa_9abc);
    for table in 0..=255u8 {
        let mut wanted = 0;
        for bit in 0..32 {
            let case = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1);
            wanted |= u32::from(table >> case & 1) << bit;
        }
        if table % 17 == 3 || matches!(table, 0x80 | 0xfe | 0x96 | 0xe8) {
            let body = format!("lop3.b32 %r9, %r0, %r1, %r2, {table:#x};\ncvt.u64.u32 %q, %r9;");
            assert_eq!(
                eval(&body, [a.into(), b.into(), c.into(), 0]).0,
                u64::from(wanted),
                "{table:x}"
            );
        }
    }
}

#[test]
fn other_instructions_of_32_bits() {
    let minus = |number: i32| number.cast_unsigned();
    for (instruction, inputs, wanted) in [
        ("shf.l.wrap.b32", [0x8000_0001, 0x1234_5678, 36], 0x2345_6788),
        ("shf.l.clamp.b32", [0x8000_0001, 0x1234_5678, 36], 0x8000_0001),
        ("shf.r.wrap.b32", [0x8000_0001, 0x1234_5678, 4], 0x8800_0000),
        ("shf.r.clamp.b32", [0x8000_0001, 0x1234_5678, 99], 0x1234_5678),
        (
            "dp4a.s32.s32",
            [0xff02_0380, 0x0102_03ff, 10],
            minus(10 + 128 + 9 + 4 - 1),
        ),
        (
            "dp4a.u32.u32",
            [0xff02_0380, 0x0102_03ff, 10],
            10 + 0x80 * 255 + 9 + 4 + 255,
        ),
        (
            "dp4a.u32.s32",
            [0xff02_0380, 0x0102_03ff, 10],
            minus(10 - 128 + 9 + 4 + 255),
        ),
        ("mad.hi.s32", [minus(-5), 0x4000_0000, 7], minus(-2 + 7)),
        ("mad.hi.u32", [0xffff_ffff, 0xffff_ffff, 1], 0xffff_ffff),
        ("sad.s32", [minus(-3), 4, 10], 17),
        ("sad.u32", [2, 9, 1], 8),
        ("slct.b32.s32", [11, 22, minus(-1)], 22),
        ("slct.b32.s32", [11, 22, 0], 11),
        ("slct.b32.f32", [11, 22, 0x8000_0000], 11),
        ("slct.b32.f32", [11, 22, 0xbf80_0000], 22),
    ] {
        assert_eq!(word(instruction, inputs), wanted, "{instruction} {inputs:x?}");
    }
    for (instruction, a, wanted) in [
        ("bfind.u32", 0x0001_0000u32, 16),
        ("bfind.s32", minus(-2), 0),
        ("bfind.s32", minus(-1), u32::MAX),
        ("bfind.shiftamt.u32", 1, 31),
        ("cnot.b32", 0, 1),
        ("cnot.b32", 9, 0),
        ("neg.s32", 5, minus(-5)),
    ] {
        let body = format!("{instruction} %r9, %r0;\ncvt.u64.u32 %q, %r9;");
        assert_eq!(
            eval(&body, [a.into(), 0, 0, 0]).0,
            u64::from(wanted),
            "{instruction} {a:x}"
        );
    }
    for (instruction, a, b, wanted) in [
        ("add.sat.s32", i32::MAX.cast_unsigned(), 5, i32::MAX.cast_unsigned()),
        ("sub.sat.s32", i32::MIN.cast_unsigned(), 5, i32::MIN.cast_unsigned()),
        ("mul24.lo.s32", 0x00ff_ffff, 3, minus(-3)),
        ("shr.s32", minus(-8), 99, u32::MAX),
        ("shr.u32", 8, 32, 0),
        ("shl.b32", 8, 32, 0),
        ("div.s32", i32::MIN.cast_unsigned(), u32::MAX, i32::MIN.cast_unsigned()),
        ("rem.s32", minus(-7), 3, minus(-1)),
    ] {
        let body = format!("{instruction} %r9, %r0, %r1;\ncvt.u64.u32 %q, %r9;");
        assert_eq!(
            eval(&body, [a.into(), b.into(), 0, 0]).0,
            u64::from(wanted),
            "{instruction} {a:x} {b:x}"
        );
    }
}

#[test]
fn carries_go_through_128_bits() {
    let body = "add.cc.u64 %q, %a0, %a2;\naddc.u64 %o, %a1, %a3;";
    let (a, b) = (
        0xffff_ffff_ffff_fff0_0000_0000_0000_0001u128,
        0x0f_ffff_ffff_ffff_ffff_u128,
    );
    let parts = |number: u128| (number as u64, (number >> 64) as u64);
    let ((a0, a1), (b0, b1)) = (parts(a), parts(b));
    assert_eq!(eval(body, [a0, a1, b0, b1]), parts(a.wrapping_add(b)));
    let body = "sub.cc.u64 %q, %a0, %a2;\nsubc.u64 %o, %a1, %a3;";
    assert_eq!(eval(body, [a0, a1, b0, b1]), parts(a.wrapping_sub(b)));
    assert_eq!(eval(body, [b0, b1, a0, a1]), parts(b.wrapping_sub(a)));
    // The flag says that nothing was borrowed, for whoever reads it by addc.
    let body = "sub.cc.u64 %d0, %a0, %a1;\naddc.u64 %q, %a3, %a3;\nsub.cc.u64 %d0, %a1, %a0;\naddc.u64 %o, %a3, %a3;";
    assert_eq!(eval(body, [7, 9, 0, 0]), (0, 1));
    let body = "mad.lo.cc.u32 %r8, %r0, %r1, %r2;\nmadc.hi.u32 %r9, %r0, %r1, %r3;\nmov.b64 %q, {%r8, %r9};";
    let wide = 0xffff_fff1u64 * 0xeeee_eeee + ((7 << 32) | 0xffff_ffff);
    assert_eq!(eval(body, [0xffff_fff1, 0xeeee_eeee, 0xffff_ffff, 7]).0, wide);
}

#[test]
fn conversions_round_saturate_and_keep_signs() {
    let f = |value: f32| u64::from(value.to_bits());
    let d = |value: f64| value.to_bits();
    let minus = |value: i64| value.cast_unsigned();
    for (body, a, wanted) in [
        ("cvt.rni.s32.f32 %r9, %r0;\ncvt.s64.s32 %q, %r9;", f(-2.5), minus(-2)),
        ("cvt.rzi.s32.f32 %r9, %r0;\ncvt.s64.s32 %q, %r9;", f(-2.5), minus(-2)),
        ("cvt.rmi.s32.f32 %r9, %r0;\ncvt.s64.s32 %q, %r9;", f(-2.5), minus(-3)),
        ("cvt.rpi.s32.f32 %r9, %r0;\ncvt.s64.s32 %q, %r9;", f(-2.5), minus(-2)),
        (
            "cvt.rzi.s32.f32 %r9, %r0;\ncvt.s64.s32 %q, %r9;",
            f(1e20),
            i64::from(i32::MAX).cast_unsigned(),
        ),
        ("cvt.rzi.u32.f32 %r9, %r0;\ncvt.u64.u32 %q, %r9;", f(-7.0), 0),
        ("cvt.rzi.u32.f32 %r9, %r0;\ncvt.u64.u32 %q, %r9;", f(f32::NAN), 0),
        ("cvt.sat.u8.s32 %r9, %r0;\ncvt.u64.u32 %q, %r9;", 300, 255),
        (
            "cvt.sat.s8.s32 %r9, %r0;\ncvt.s64.s32 %q, %r9;",
            0xffff_ff00,
            minus(-128),
        ),
        ("cvt.s64.s8 %q, %r0;", 0x1ff, minus(-1)),
        ("cvt.u64.u16 %q, %r0;", 0x1_ffff, 0xffff),
        (
            "cvt.rn.f32.u64 %r9, %a0;\ncvt.u64.u32 %q, %r9;",
            (1 << 24) + 1,
            f(16_777_216.0),
        ),
        (
            "cvt.rp.f32.u64 %r9, %a0;\ncvt.u64.u32 %q, %r9;",
            (1 << 24) + 1,
            f(16_777_218.0),
        ),
        (
            "cvt.rn.f32.u64 %r9, %a0;\ncvt.u64.u32 %q, %r9;",
            0x8000_0080_0000_0001,
            f(9_223_373_136_366_403_584.0),
        ),
        (
            "cvt.rz.f64.s64 %q, %a0;",
            minus(-(1 << 53) - 1),
            d(-9_007_199_254_740_992.0),
        ),
        (
            "cvt.rm.f64.s64 %q, %a0;",
            minus(-(1 << 53) - 1),
            d(-9_007_199_254_740_994.0),
        ),
        (
            "cvt.rz.f32.f64 %r9, %a0;\ncvt.u64.u32 %q, %r9;",
            d(0.1),
            f(0.1f32.next_down()),
        ),
        ("cvt.rn.f32.f64 %r9, %a0;\ncvt.u64.u32 %q, %r9;", d(0.1), f(0.1)),
        ("cvt.f64.f32 %q, %r0;", f(0.1), d(f64::from(0.1f32))),
        ("cvt.sat.f32.f32 %r9, %r0;\ncvt.u64.u32 %q, %r9;", f(1.5), f(1.0)),
        ("cvt.rzi.f32.f32 %r9, %r0;\ncvt.u64.u32 %q, %r9;", f(-1.5), f(-1.0)),
        ("cvt.ftz.f64.f32 %q, %r0;", f(1e-40), d(0.0)),
        ("cvt.rn.f16.f32 %h4, %r0;\ncvt.u64.u16 %q, %h4;", f(1.0 / 3.0), 0x3555),
        ("cvt.rz.f16.f32 %h4, %r0;\ncvt.u64.u16 %q, %h4;", f(70_000.0), 0x7bff),
        (
            "cvt.rn.bf16.f32 %h4, %r0;\ncvt.u64.u16 %q, %h4;",
            f(1.0 + 3.0 / 256.0),
            0x3f82,
        ),
        ("cvt.f32.f16 %r9, %h0;\ncvt.u64.u32 %q, %r9;", 0xc500, f(-5.0)),
        ("cvt.f32.bf16 %r9, %h0;\ncvt.u64.u32 %q, %r9;", 0xc0a0, f(-5.0)),
        (
            "mov.b32 %r8, 0f3F800000;\ncvt.rn.f16x2.f32 %r9, %r0, %r8;\ncvt.u64.u32 %q, %r9;",
            f(2.0),
            0x4000_3c00,
        ),
    ] {
        assert_eq!(eval(body, [a, 0, 0, 0]).0, wanted, "{body} of {a:x}");
    }
}

#[test]
fn floating_point_treats_no_numbers_zeros_and_halves_as_ptx_does() {
    let nan = 0x7fc0_0000;
    let f = |value: f32| value.to_bits();
    for (instruction, a, b, wanted) in [
        ("min.f32", nan, f(3.0), f(3.0)),
        ("min.NaN.f32", nan, f(3.0), 0x7fff_ffff),
        ("max.f32", f(-0.0), f(0.0), f(0.0)),
        ("min.f32", f(0.0), f(-0.0), f(-0.0)),
        ("add.f32", nan, f(3.0), 0x7fff_ffff),
        ("add.sat.f32", f(3.0), f(3.0), f(1.0)),
        ("add.ftz.f32", f(1e-40), f(0.0), 0),
        ("add.f32", f(1e-40), f(0.0), f(1e-40)),
        ("mul.ftz.f32", f(-1e-30), f(1e-10), f(-0.0)),
        ("max.ftz.f32", f(1e-40), f(-1.0), 0),
        ("max.f32", f(1e-40), f(-1.0), f(1e-40)),
        ("div.rm.f32", f(1.0), f(3.0), f((1.0f32 / 3.0).next_down())),
        ("mul.rz.f32", f(0.1), f(0.1), 0x3c23_d70a),
        ("add.f16x2", 0x3c00_4000, 0x3c00_3c00, 0x4000_4200),
        ("mul.bf16x2", 0x3f80_4000, 0x4040_4040, 0x4040_40c0),
        ("set.lt.u32.f32", f(1.0), f(2.0), u32::MAX),
        ("set.gt.f32.f32", f(1.0), f(2.0), 0),
        ("div.approx.f32", f(1.0), f(3.0), f(1.0 / 3.0)),
    ] {
        let body = format!("{instruction} %r9, %r0, %r1;\ncvt.u64.u32 %q, %r9;");
        assert_eq!(
            eval(&body, [a.into(), b.into(), 0, 0]).0,
            u64::from(wanted),
            "{instruction} {a:x} {b:x}"
        );
    }
    let compare = |cmp: &str, a: f32, b: f32| {
        let body = format!("setp.{cmp}.f32 %p1, %r0, %r1;\nselp.u64 %q, 1, 0, %p1;");
        eval(&body, [f(a).into(), f(b).into(), 0, 0]).0
    };
    assert_eq!(
        [
            compare("lt", f32::NAN, 1.0),
            compare("ltu", f32::NAN, 1.0),
            compare("neu", 1.0, 1.0)
        ],
        [0, 1, 0]
    );
    assert_eq!(
        [
            compare("num", 1.0, 2.0),
            compare("nan", 1.0, 2.0),
            compare("ne", f32::NAN, 1.0)
        ],
        [1, 0, 0]
    );
    let body = "fma.rn.f16 %h4, %h0, %h1, %h2;\ncvt.u64.u16 %q, %h4;";
    assert_eq!(
        eval(body, [0x3c03, 0x3c03, 0xbc00, 0]).0,
        0x1e02,
        "(1 + 3e)^2 - 1 without rounding in between"
    );
    // Halfway between two numbers but for a part that binary64 does not have: rounding twice goes up.
    let body = "fma.rn.f32 %r9, %r0, %r1, %r2;\ncvt.u64.u32 %q, %r9;";
    let (a, b) = (f(2f32.powi(-12) + 2f32.powi(-27)), f(2f32.powi(-12) - 2f32.powi(-27)));
    assert_eq!(eval(body, [a.into(), b.into(), 0x3f80_0001, 0]).0, 0x3f80_0001);
    let body = "fma.rn.ftz.f32 %r9, %r0, %r1, %r2;\ncvt.u64.u32 %q, %r9;";
    assert_eq!(eval(body, [f(1e-30).into(), f(1e-10).into(), f(1e-40).into(), 0]).0, 0);
    for (instruction, a, wanted) in [
        ("ex2.approx.f32", 3.5, 3.5f32.exp2()),
        ("lg2.approx.f32", 10.0, 10f32.log2()),
        ("sin.approx.f32", 1.0, 1f32.sin()),
    ] {
        let body = format!("{instruction} %r9, %r0;\ncvt.u64.u32 %q, %r9;");
        let found = f32::from_bits(u32::try_from(eval(&body, [f(a).into(), 0, 0, 0]).0).unwrap());
        assert!(
            (found - wanted).abs() <= wanted.abs() * 3e-7,
            "{instruction}: {found} {wanted}"
        );
    }
}

#[test]
fn predicates_branches_by_index_and_spaces() {
    let body = "setp.lt.and.s32 %p1|%p2, %r0, %r1, !%p0;\nselp.u64 %q, 1, 0, %p1;\nselp.u64 %o, 1, 0, %p2;";
    let body = format!("mov.pred %p0, 0;\n{body}");
    assert_eq!(eval(&body, [1, 2, 0, 0]), (1, 0));
    assert_eq!(eval(&body, [2, 1, 0, 0]), (0, 1));
    let body = "targets: .branchtargets one, two, one;\nbrx.idx %r0, targets;\none: mov.u64 %q, 11;\nbra.uni end;\ntwo: mov.u64 %q, 22;\nend:";
    assert_eq!([0, 1, 2].map(|index| eval(body, [index, 0, 0, 0]).0), [11, 22, 11]);
    let body = "mov.u64 %d0, room;\ncvta.shared.u64 %d1, %d0;\nisspacep.shared %p0, %d1;\nisspacep.global %p1, %d1;\nisspacep.global %p2, %in;\n\
                st.u32 [%d1+4], %r0;\natom.add.u32 %r9, [%d1+4], 5;\ncvta.to.shared.u64 %d2, %d1;\nld.shared.u32 %r8, [%d2+4];\n\
                mov.b64 %q, {%r8, %r9};\nselp.u64 %o, 1, 0, %p0;\n@%p1 add.u64 %o, %o, 2;\n@%p2 add.u64 %o, %o, 4;";
    assert_eq!(eval(body, [7, 0, 0, 0]), ((7 << 32) | 12, 5));
    let body = "{ .reg .b32 %r0; mov.u32 %r0, 5; cvt.u64.u32 %q, %r0; }\ncvt.u64.u32 %o, %r0;";
    assert_eq!(eval(body, [9, 0, 0, 0]), (5, 9), "a block's registers are its own");
}

#[test]
fn loads_extend_signs_and_threads_that_parted_meet_again() {
    let body = "ld.global.s8 %r8, [%in];\nld.global.u8 %r9, [%in];\ncvt.s64.s32 %q, %r8;\ncvt.u64.u32 %o, %r9;";
    assert_eq!(eval(body, [0x85, 0, 0, 0]), (0x85u64.wrapping_sub(0x100), 0x85));
    let text = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 out)\n{\n\
        .reg .b64 %d<3>;\n.reg .b32 %r<5>;\n.reg .pred %p;\nld.param.u64 %d0, [out];\nmov.u32 %r0, %tid.x;\n\
        and.b32 %r1, %r0, 1;\nsetp.eq.u32 %p, %r1, 0;\n@%p bra even;\nadd.u32 %r2, %r0, 100;\nbra.uni end;\n\
        even: add.u32 %r2, %r0, 200;\nend: activemask.b32 %r3;\nmul.wide.u32 %d1, %r0, 8;\nadd.u64 %d2, %d0, %d1;\n\
        st.global.v2.u32 [%d2], {%r2, %r3};\nret;\n}\n";
    let mut device = Device::new(text);
    let out = device.upload(&[0u32; 64]);
    device.run("k", 1, 32, &Args::new().pointer(out));
    let wanted = (0..32).flat_map(|thread| [thread + if thread % 2 == 0 { 200 } else { 100 }, u32::MAX]);
    assert_eq!(device.download::<u32>(out, 64), wanted.collect::<Vec<u32>>());
}

fn module(body: &str) -> String {
    format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{{\n.reg .b32 %r<4>;\n.reg .b64 %d<4>;\n{body}\nret;\n}}\n.visible .entry fine()\n{{\nret;\n}}\n"
    )
}

#[test]
fn what_is_not_interpreted_is_refused_with_its_line_and_only_where_it_is() {
    for (body, wanted) in [
        (
            "wmma.load.a.sync.aligned.m16n16k16.row.f16 {%r0}, [%d0], %r1;",
            "tensor cores",
        ),
        (
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r0}, {%r1}, {%r2}, {%r3};",
            "tensor cores",
        ),
        ("tex.2d.v4.f32.f32 {%r0}, [%d0, {%r1}];", "textures"),
        ("cp.async.ca.shared.global [%d0], [%d1], 4;", "asynchronous copies"),
        ("shfl.up.b32 %r0, %r1, 1, 0;", "__shfl_sync"),
        ("call (%r0), %d0, (%r1), proto;", "pointers to functions"),
        ("add.frobnicate.u32 %r0, %r1, %r2;", "docs/accel-ptx.md"),
        ("add.u32 %r0, %r1;", "2 operands"),
        ("bra nowhere;", "no label 'nowhere'"),
        ("add.rz.f64 %d0, %d1, %d2;", "directed roundings"),
        ("mov.u32 %r0, %nonsense;", "neither a register"),
    ] {
        let program = Program::parse(&module(body)).unwrap();
        assert!(program.kernel("fine").is_ok(), "{body}");
        let LaunchError::NotInterpreted { refused, .. } = program.kernel("k").unwrap_err() else {
            panic!("{body} was not refused");
        };
        assert_eq!(refused.line, 8, "{refused}");
        assert!(refused.to_string().contains(wanted), "{body}: {refused}");
    }
}

#[test]
fn what_is_no_module_is_refused() {
    let refused = |text: &str| -> Refused { Program::parse(text).unwrap_err() };
    let head = ".version 8.0\n.target sm_80\n.address_size 64\n";
    for (text, wanted) in [
        (String::new(), "unexpected end"),
        (".version 3.2\n.target sm_20".to_owned(), "PTX 3.2"),
        (".version 8.0\n.target sm_35".to_owned(), "compute_50"),
        (".version 8.0\n.target sm_80\n.address_size 32".to_owned(), "32 bits"),
        (format!("{head}.entry k() {{ .reg .b32 %r<99999>; }}"), "registers"),
        (
            format!("{head}.entry k() {{ .shared .b8 x[999999]; }}"),
            "shared memory",
        ),
        (format!("{head}.global .u32 x[2] = {{1, 2, 3}};"), "more initial values"),
        (format!("{head}.global .u32 x; .global .u32 x;"), "declared twice"),
        (
            format!("{head}.entry k() {{ ret; }} .entry k() {{ ret; }}"),
            "defined twice",
        ),
        (format!("{head}.entry k() {{ ret;"), "unexpected end"),
        (format!("{head}.entry k() {{ {} }}", "{".repeat(100)), "nested"),
        (format!("{head}.global .b8 x[99999999999];"), "allocate"),
        (format!("{head}.global .texref t;"), "textures"),
    ] {
        let refused = refused(&text);
        assert!(refused.to_string().contains(wanted), "{text}: {refused}");
    }
}

#[test]
fn a_launch_that_the_kernel_does_not_allow_is_refused() {
    let text = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u32 x)\n.maxntid 64, 1, 1\n{\nret;\n}\n";
    let mut device = Device::new(text);
    let mut refused = |blocks, threads, shared, args: &Args| match device
        .try_run("k", ([blocks, 1], [threads, 1]), shared, args)
        .unwrap_err()
    {
        LaunchError::Configuration { what, .. } => what,
        other => panic!("{other}"),
    };
    let args = Args::new().int(1);
    assert_eq!(refused(1, 65, 0, &args), "threads of a block");
    assert_eq!(refused(1, 0, 0, &args), "threads of a block");
    assert_eq!(refused(0, 1, 0, &args), "blocks in one direction");
    assert_eq!(refused(1, 1, 300_000, &args), "shared memory");
    assert_eq!(refused(1, 1, 0, &args.clone().int(2)), "bytes of parameters");
    assert!(matches!(
        device.try_run("other", ([1, 1], [1, 1]), 0, &args),
        Err(LaunchError::NoKernel(_))
    ));
}
