// What the guests of `bare-switch` are, in 64-bit mode at privilege level 0. RBX is the window that both have:
//
//     0 what the server is to do beside its answer   8 argument   16 answer   24 calls so far   32 what came of it
//
// R14 is a number of the server's own, which the client knows only to check answers by.

.pushsection .rodata

.global bare_switch_server
.global bare_switch_server_end
bare_switch_server:
    movq xmm1, r14
.Lwait:
    movabs rax, 0x62617361746c0001
    vmmcall
    inc r15
    // Three times the argument, and the number, which stays in a register of the FPU; RAX is to be 0.
    mov rdx, [rbx + 8]
    lea rdx, [rdx + rdx * 2]
    movq rcx, xmm1
    add rdx, rcx
    add rdx, rax
    mov [rbx + 16], rdx
    mov [rbx + 24], r15
    // The client is not to find this there.
    movq xmm0, r15
    mov rdx, [rbx]
    cmp rdx, 1
    je .Lspin
    cmp rdx, 2
    je .Lhalt
    cmp rdx, 3
    je .Loutside
    cmp rdx, 4
    je .Lport
    cmp rdx, 5
    je .Lfault
    cmp rdx, 6
    je .Lapic
    cmp rdx, 7
    je .Lnested
    jmp .Lwait
.Lspin:
    pause
    cmp qword ptr [rbx], 1
    je .Lspin
    jmp .Lwait
.Lhalt:
    sti
    hlt
    jmp .Lhalt
.Loutside:
    mov ecx, 0x10000000
    mov rcx, [rcx]
    mov [rbx + 32], rcx
    jmp .Lwait
.Lport:
    in eax, 0x77
    mov [rbx + 32], rax
    jmp .Lwait
.Lfault:
    ud2
.Lapic:
    // An interrupt, and one for all others.
    xor edx, edx
    mov eax, 0x51
    mov ecx, 0x83f
    wrmsr
    mov eax, 0xc0451
    mov ecx, 0x830
    wrmsr
    mov ecx, 0x80d
    rdmsr
    mov [rbx + 32], rax
    jmp .Lwait
.Lnested:
    movabs rax, 0x62617361746c0002
    xor ecx, ecx
    vmmcall
    mov [rbx + 32], rax
    jmp .Lwait
bare_switch_server_end:

// Enters the server of number R10 R8 times, and checks each answer.
.global bare_switch_calls
.global bare_switch_calls_end
bare_switch_calls:
    movq xmm0, r14
.Lcall:
    mov [rbx + 8], r8
.Lenter:
    movabs rax, 0x62617361746c0002
    mov rcx, r10
    vmmcall
    cmp rax, 1
    je .Lenter
    test rax, rax
    jnz .Lfailed
    mov eax, 0xff
    lea rcx, [r8 + r8 * 2]
    add rcx, r14
    cmp rcx, [rbx + 16]
    jne .Lfailed
    movq rcx, xmm0
    cmp rcx, r14
    jne .Lfailed
    dec r8
    jnz .Lcall
    out 0x10, al
.Lfailed:
    out 0x11, al
    hlt
bare_switch_calls_end:

// Has the server done with R8 times, whoever else enters it; tells at R9 how often it could not be entered meanwhile.
.global bare_switch_beside
.global bare_switch_beside_end
bare_switch_beside:
    mov ecx, 0x80f
    mov eax, 0x1ff
    xor edx, edx
    wrmsr
    sti
    xor r13d, r13d
    movq xmm0, r14
.Lbeside:
    movabs rax, 0x62617361746c0002
    mov rcx, r10
    vmmcall
    cmp rax, 2
    je .Lbusy
    cmp rax, 1
    je .Lbeside
    test rax, rax
    jnz .Lfailed_beside
    mov eax, 0xff
    movq rcx, xmm0
    cmp rcx, r14
    jne .Lfailed_beside
    dec r8
    jnz .Lbeside
    mov [r9], r13
    out 0x10, al
.Lfailed_beside:
    out 0x11, al
    hlt
.Lbusy:
    inc r13
    pause
    jmp .Lbeside
bare_switch_beside_end:

// Takes interrupts, if R9 says so, and enters the server once.
.global bare_switch_once
.global bare_switch_once_end
bare_switch_once:
    mov ecx, 0x80f
    mov eax, 0x1ff
    xor edx, edx
    wrmsr
    test r9, r9
    jz .Lonce
    sti
.Lonce:
    movabs rax, 0x62617361746c0002
    mov rcx, r10
    vmmcall
    nop
    cli
    out 0x11, al
    hlt
bare_switch_once_end:

// What comes out to user space R8 times.
.global bare_switch_exits
.global bare_switch_exits_end
bare_switch_exits:
    out 0x77, al
    dec r8
    jnz bare_switch_exits
    out 0x10, al
    hlt
bare_switch_exits_end:

// The handler of all vectors from 32 on: counts, and ends the interrupt.
.global bare_switch_handler
.global bare_switch_handler_end
bare_switch_handler:
    push rax
    push rcx
    push rdx
    mov eax, 0xd000
    inc dword ptr [rax]
    mov ecx, 0x80b
    xor eax, eax
    xor edx, edx
    wrmsr
    pop rdx
    pop rcx
    pop rax
    iretq
bare_switch_handler_end:

.popsection
