//! Between the engine's register types and KVM's. No system calls here.

use engine::state::{Activity, GeneralRegisters, PendingEvents, Segment, SystemRegisters, Table};
use kvm_bindings::{
    KVM_MP_STATE_HALTED, KVM_MP_STATE_INIT_RECEIVED, KVM_MP_STATE_RUNNABLE, KVM_MP_STATE_SIPI_RECEIVED,
    KVM_MP_STATE_UNINITIALIZED, KVM_VCPUEVENT_VALID_NMI_PENDING, KVM_VCPUEVENT_VALID_SHADOW,
    KVM_VCPUEVENT_VALID_SIPI_VECTOR, KVM_VCPUEVENT_VALID_SMM, kvm_dtable, kvm_regs, kvm_segment, kvm_sregs,
    kvm_vcpu_events,
};

pub(crate) fn general_to_kvm(from: &GeneralRegisters) -> kvm_regs {
    let [
        rax,
        rcx,
        rdx,
        rbx,
        rsp,
        rbp,
        rsi,
        rdi,
        r8,
        r9,
        r10,
        r11,
        r12,
        r13,
        r14,
        r15,
    ] = from.gpr;
    let (rip, rflags) = (from.rip, from.rflags);
    kvm_regs {
        rax,
        rbx,
        rcx,
        rdx,
        rsi,
        rdi,
        rsp,
        rbp,
        r8,
        r9,
        r10,
        r11,
        r12,
        r13,
        r14,
        r15,
        rip,
        rflags,
    }
}

pub(crate) fn general_from_kvm(from: &kvm_regs) -> GeneralRegisters {
    GeneralRegisters {
        gpr: [
            from.rax, from.rcx, from.rdx, from.rbx, from.rsp, from.rbp, from.rsi, from.rdi, from.r8, from.r9, from.r10,
            from.r11, from.r12, from.r13, from.r14, from.r15,
        ],
        rip: from.rip,
        rflags: from.rflags,
    }
}

fn segment_to_kvm(from: &Segment) -> kvm_segment {
    let bits = |shift: u32, mask: u32| u8::try_from((from.rights >> shift) & mask).unwrap_or(0);
    kvm_segment {
        base: from.base,
        limit: from.limit,
        selector: from.selector,
        type_: bits(0, 0xf),
        s: bits(4, 1),
        dpl: bits(5, 3),
        present: bits(7, 1),
        avl: bits(8, 1),
        l: bits(9, 1),
        db: bits(10, 1),
        g: bits(11, 1),
        unusable: bits(16, 1),
        padding: 0,
    }
}

fn segment_from_kvm(from: &kvm_segment) -> Segment {
    let parts = [
        (from.type_, 0),
        (from.s, 4),
        (from.dpl, 5),
        (from.present, 7),
        (from.avl, 8),
        (from.l, 9),
        (from.db, 10),
        (from.g, 11),
        (from.unusable, 16),
    ];
    let rights = parts
        .iter()
        .fold(0, |rights, (value, shift)| rights | (u32::from(*value) << shift));
    Segment {
        base: from.base,
        limit: from.limit,
        selector: from.selector,
        rights,
    }
}

fn table_to_kvm(from: Table) -> kvm_dtable {
    kvm_dtable {
        base: from.base,
        limit: from.limit,
        ..kvm_dtable::default()
    }
}

fn table_from_kvm(from: &kvm_dtable) -> Table {
    Table {
        base: from.base,
        limit: from.limit,
    }
}

pub(crate) fn system_to_kvm(from: &SystemRegisters) -> kvm_sregs {
    let [cs, ds, es, fs, gs, ss] = from.segments.each_ref().map(segment_to_kvm);
    let [cr0, cr2, cr3, cr4, cr8] = from.cr;
    kvm_sregs {
        cs,
        ds,
        es,
        fs,
        gs,
        ss,
        tr: segment_to_kvm(&from.tr),
        ldt: segment_to_kvm(&from.ldtr),
        gdt: table_to_kvm(from.gdt),
        idt: table_to_kvm(from.idt),
        cr0,
        cr2,
        cr3,
        cr4,
        cr8,
        efer: from.efer,
        apic_base: from.apic_base,
        interrupt_bitmap: [0; 4],
    }
}

pub(crate) fn system_from_kvm(from: &kvm_sregs) -> SystemRegisters {
    SystemRegisters {
        segments: [&from.cs, &from.ds, &from.es, &from.fs, &from.gs, &from.ss].map(segment_from_kvm),
        tr: segment_from_kvm(&from.tr),
        ldtr: segment_from_kvm(&from.ldt),
        gdt: table_from_kvm(&from.gdt),
        idt: table_from_kvm(&from.idt),
        cr: [from.cr0, from.cr2, from.cr3, from.cr4, from.cr8],
        efer: from.efer,
        apic_base: from.apic_base,
    }
}

pub(crate) fn events_from_kvm(from: &kvm_vcpu_events) -> PendingEvents {
    let exception = &from.exception;
    let happens = exception.injected != 0 || exception.pending != 0;
    let valid = |flag: u32| from.flags & flag != 0;
    let smm = [
        from.smi.smm,
        from.smi.pending,
        from.smi.smm_inside_nmi,
        from.smi.latched_init,
    ]
    .map(|v| v != 0);
    PendingEvents {
        exception: happens.then(|| {
            (
                exception.nr,
                (exception.has_error_code != 0).then_some(exception.error_code),
            )
        }),
        exception_pending: exception.pending != 0,
        interrupt: (from.interrupt.injected != 0).then_some((from.interrupt.nr, from.interrupt.soft != 0)),
        interrupt_shadow: if valid(KVM_VCPUEVENT_VALID_SHADOW) {
            from.interrupt.shadow
        } else {
            0
        },
        nmi_injected: from.nmi.injected != 0,
        nmi_pending: from.nmi.pending != 0,
        nmi_masked: from.nmi.masked != 0,
        sipi_vector: if valid(KVM_VCPUEVENT_VALID_SIPI_VECTOR) {
            from.sipi_vector
        } else {
            0
        },
        smm: if valid(KVM_VCPUEVENT_VALID_SMM) {
            smm
        } else {
            [false; 4]
        },
    }
}

pub(crate) fn events_to_kvm(from: &PendingEvents) -> kvm_vcpu_events {
    let mut to = kvm_vcpu_events {
        flags: KVM_VCPUEVENT_VALID_NMI_PENDING
            | KVM_VCPUEVENT_VALID_SIPI_VECTOR
            | KVM_VCPUEVENT_VALID_SHADOW
            | KVM_VCPUEVENT_VALID_SMM,
        sipi_vector: from.sipi_vector,
        ..kvm_vcpu_events::default()
    };
    if let Some((vector, error_code)) = from.exception {
        to.exception.nr = vector;
        to.exception.has_error_code = u8::from(error_code.is_some());
        to.exception.error_code = error_code.unwrap_or(0);
        to.exception.pending = u8::from(from.exception_pending);
        to.exception.injected = u8::from(!from.exception_pending);
    }
    if let Some((vector, soft)) = from.interrupt {
        to.interrupt.injected = 1;
        to.interrupt.nr = vector;
        to.interrupt.soft = u8::from(soft);
    }
    to.interrupt.shadow = from.interrupt_shadow;
    to.nmi.injected = u8::from(from.nmi_injected);
    to.nmi.pending = u8::from(from.nmi_pending);
    to.nmi.masked = u8::from(from.nmi_masked);
    [to.smi.smm, to.smi.pending, to.smi.smm_inside_nmi, to.smi.latched_init] = from.smm.map(u8::from);
    to
}

const ACTIVITIES: [(Activity, u32); 5] = [
    (Activity::Runnable, KVM_MP_STATE_RUNNABLE),
    (Activity::Uninitialized, KVM_MP_STATE_UNINITIALIZED),
    (Activity::InitReceived, KVM_MP_STATE_INIT_RECEIVED),
    (Activity::SipiReceived, KVM_MP_STATE_SIPI_RECEIVED),
    (Activity::Halted, KVM_MP_STATE_HALTED),
];

pub(crate) fn activity_from_kvm(state: u32) -> Option<Activity> {
    ACTIVITIES
        .iter()
        .find(|(_, number)| *number == state)
        .map(|(activity, _)| *activity)
}

pub(crate) fn activity_to_kvm(activity: Activity) -> u32 {
    ACTIVITIES
        .iter()
        .find(|(known, _)| *known == activity)
        .map_or(KVM_MP_STATE_RUNNABLE, |(_, number)| *number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_survive_the_round_trip() {
        let mut general = GeneralRegisters {
            rip: 0x1000,
            rflags: 2,
            ..GeneralRegisters::default()
        };
        for (index, value) in general.gpr.iter_mut().enumerate() {
            *value = 0x1111_0000 + index as u64;
        }
        assert_eq!(general_from_kvm(&general_to_kvm(&general)), general);

        let mut system = SystemRegisters {
            cr: [1, 2, 3, 4, 5],
            efer: 0xd01,
            ..SystemRegisters::default()
        };
        for (index, segment) in system.segments.iter_mut().enumerate() {
            let rights = 0xa09b + u32::try_from(index).unwrap();
            *segment = Segment {
                base: index as u64,
                limit: 0xffff_ffff,
                selector: 8,
                rights: rights & 0x1_0fff,
            };
        }
        system.gdt = Table {
            base: 0x500,
            limit: 0x1f,
        };
        assert_eq!(system_from_kvm(&system_to_kvm(&system)), system);
    }

    #[test]
    fn events_survive_the_round_trip() {
        let events = PendingEvents {
            exception: Some((14, Some(2))),
            exception_pending: true,
            interrupt: Some((0x30, false)),
            interrupt_shadow: 1,
            nmi_pending: true,
            sipi_vector: 0x9a,
            smm: [false, true, false, true],
            ..PendingEvents::default()
        };
        assert_eq!(events_from_kvm(&events_to_kvm(&events)), events);
        assert_eq!(
            events_from_kvm(&events_to_kvm(&PendingEvents::default())),
            PendingEvents::default()
        );
    }

    #[test]
    fn every_activity_has_a_number() {
        for (activity, number) in ACTIVITIES {
            assert_eq!(activity_from_kvm(activity_to_kvm(activity)), Some(activity));
            assert_eq!(activity_to_kvm(activity), number);
        }
        assert_eq!(activity_from_kvm(99), None);
    }
}
