package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// packages are what the lab needs on the host. The guest sees the host's root, so some are for it.
var packages = []string{
	"busybox-static", "ibverbs-providers", "ibverbs-utils", "iproute2", "kmod", "perftest",
	"qemu-system-x86", "qperf", "rdma-core", "xz-utils",
}

// base is what setup prepares once for all labs.
type base struct {
	cache   string
	kernel  string // folder with vmlinux and lib/modules
	version string // of the kernel
	initrd  string
}

// cacheDir is $RDMABENCH_LAB_CACHE, or rdmabench-lab in the user's cache folder.
func cacheDir() (string, error) {
	dir := os.Getenv("RDMABENCH_LAB_CACHE")
	if dir == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Errorf("%w: set $RDMABENCH_LAB_CACHE to a folder that may hold 500 MB", err)
		}
		dir = filepath.Join(user, "rdmabench-lab")
	}
	return filepath.Abs(dir)
}

// setup installs missing packages and fetches and builds what is not in the cache.
func setup(ctx context.Context) (base, error) {
	if runtime.GOARCH != "amd64" {
		return base{}, fmt.Errorf("the lab runs on amd64 only: this is %s", runtime.GOARCH)
	}
	cache, err := cacheDir()
	if err != nil {
		return base{}, err
	}
	// The administrator's tools are not on everybody's path.
	if err := os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin"); err != nil {
		return base{}, err
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return base{}, err
	}
	b := base{cache: cache, kernel: filepath.Join(cache, "kernel")}
	if err := ensurePackages(ctx, cache); err != nil {
		return base{}, err
	}
	if b.version, err = ensureKernel(ctx, cache); err != nil {
		return base{}, fmt.Errorf("fetch the guest's kernel: %w", err)
	}
	if b.initrd, err = ensureInitrd(ctx, b); err != nil {
		return base{}, fmt.Errorf("build the guest's initramfs: %w", err)
	}
	return b, nil
}

// locked runs f while no other lab sets up the same cache.
func locked(ctx context.Context, cache string, f func() error) error {
	for {
		lock, err := tryLock(filepath.Join(cache, "lock"))
		if err == nil {
			defer lock.Close()
			return f()
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func missingPackages(ctx context.Context) ([]string, error) {
	args := append([]string{"-W", "-f", "${Package} ${db:Status-Status}\n"}, packages...)
	out, err := exec.CommandContext(ctx, "dpkg-query", args...).Output()
	var status *exec.ExitError
	if err != nil && !errors.As(err, &status) { // it fails if it does not know a package
		return nil, fmt.Errorf("the lab needs Debian or Ubuntu: %w", err)
	}
	var missing []string
	for _, p := range packages {
		if !strings.Contains("\n"+string(out), "\n"+p+" installed\n") {
			missing = append(missing, p)
		}
	}
	return missing, nil
}

func ensurePackages(ctx context.Context, cache string) error {
	missing, err := missingPackages(ctx)
	if err != nil || len(missing) == 0 {
		return err
	}
	return locked(ctx, cache, func() error {
		if missing, err = missingPackages(ctx); err != nil || len(missing) == 0 {
			return err
		}
		fmt.Fprintln(os.Stderr, "lab: installing", strings.Join(missing, " "))
		install := append([]string{"install", "-y", "--no-install-recommends"}, missing...)
		if err := aptGet(ctx, install...); err != nil {
			if err := aptGet(ctx, "update"); err != nil {
				return err
			}
			return aptGet(ctx, install...)
		}
		return nil
	})
}

// aptGet runs apt-get as root. What it says is shown only if it fails.
func aptGet(ctx context.Context, args ...string) error {
	argv := append([]string{"env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-o", "DPkg::Lock::Timeout=300"}, args...)
	if os.Geteuid() != 0 {
		if _, err := exec.LookPath("sudo"); err != nil {
			return fmt.Errorf("run this as root: apt-get %s", strings.Join(args, " "))
		}
		argv = append([]string{"sudo"}, argv...)
	}
	return output(exec.CommandContext(ctx, argv[0], argv[1:]...))
}

// output runs cmd and puts what it said into the error if it fails.
func output(cmd *exec.Cmd) error {
	cmd.Stdin = os.Stdin // sudo may ask for a password
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, bytes.TrimSpace(out))
	}
	return nil
}

// ensureKernel puts the distribution's generic kernel, unpacked, into the cache. The flavours for
// clouds have no rdma_rxe and no 9p. A kernel once fetched is kept.
func ensureKernel(ctx context.Context, cache string) (version string, err error) {
	dir := filepath.Join(cache, "kernel")
	if b, err := os.ReadFile(filepath.Join(dir, "version")); err == nil {
		return string(b), nil
	}
	err = locked(ctx, cache, func() error {
		if b, err := os.ReadFile(filepath.Join(dir, "version")); err == nil {
			version = string(b)
			return nil
		}
		tmp, err := os.MkdirTemp(cache, "kernel-")
		if err != nil {
			return err
		}
		defer os.RemoveAll(tmp)
		names, err := fetchKernel(ctx, tmp)
		if err != nil {
			fmt.Fprintln(os.Stderr, "lab: updating the package lists:", err)
			if err := aptGet(ctx, "update"); err != nil {
				return err
			}
			if names, err = fetchKernel(ctx, tmp); err != nil {
				return err
			}
		}
		for _, n := range names {
			if err := output(exec.CommandContext(ctx, "dpkg", "-x", n, filepath.Join(tmp, "root"))); err != nil {
				return err
			}
		}
		if version, err = unpackedKernel(ctx, filepath.Join(tmp, "root")); err != nil {
			return err
		}
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
		return os.Rename(filepath.Join(tmp, "root"), dir)
	})
	return version, err
}

// fetchKernel downloads the packages of the generic kernel into dir and returns their files.
func fetchKernel(ctx context.Context, dir string) ([]string, error) {
	var image string
	for _, meta := range []string{"linux-image-amd64", "linux-image-generic"} { // Debian's, Ubuntu's
		out, err := exec.CommandContext(ctx, "apt-cache", "depends", "--important", meta).Output()
		if err != nil {
			continue
		}
		for _, line := range strings.Split(string(out), "\n") {
			name := strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(line), "Depends:"))
			if image == "" && strings.HasPrefix(name, "linux-image-") && name != meta {
				image = name
			}
		}
	}
	if image == "" {
		return nil, errors.New("apt knows no linux-image-amd64 or linux-image-generic")
	}
	wanted := []string{image}
	for _, prefix := range []string{"linux-modules-", "linux-modules-extra-"} { // Ubuntu splits it
		name := prefix + strings.TrimPrefix(image, "linux-image-")
		if exec.CommandContext(ctx, "apt-cache", "show", name).Run() == nil {
			wanted = append(wanted, name)
		}
	}
	fmt.Fprintln(os.Stderr, "lab: fetching", strings.Join(wanted, " "))
	cmd := exec.CommandContext(ctx, "apt-get", append([]string{"-q", "-o", "APT::Sandbox::User=root", "download"}, wanted...)...)
	cmd.Dir = dir
	if err := output(cmd); err != nil {
		return nil, err
	}
	return filepath.Glob(filepath.Join(dir, "*.deb"))
}

// unpackedKernel makes root, an unpacked kernel package, ready for use.
func unpackedKernel(ctx context.Context, root string) (version string, err error) {
	images, err := filepath.Glob(filepath.Join(root, "boot", "vmlinuz-*"))
	if err != nil {
		return "", err
	}
	if len(images) != 1 {
		return "", fmt.Errorf("the package holds %d files boot/vmlinuz-*: want 1", len(images))
	}
	version = strings.TrimPrefix(filepath.Base(images[0]), "vmlinuz-")
	if err := extractKernel(ctx, images[0], filepath.Join(root, "vmlinux")); err != nil {
		return "", fmt.Errorf("%s: %w", filepath.Base(images[0]), err)
	}
	if _, err := os.Stat(filepath.Join(root, "lib/modules")); errors.Is(err, fs.ErrNotExist) {
		if err := os.Rename(filepath.Join(root, "usr/lib"), filepath.Join(root, "lib")); err != nil {
			return "", err
		}
	}
	for _, d := range []string{"boot", "usr"} {
		if err := os.RemoveAll(filepath.Join(root, d)); err != nil {
			return "", err
		}
	}
	if err := output(exec.CommandContext(ctx, "depmod", "-b", root, version)); err != nil {
		return "", err
	}
	return version, os.WriteFile(filepath.Join(root, "version"), []byte(version), 0o644)
}

// extractKernel takes the ELF image out of a bzImage. QEMU boots it without firmware and the kernel
// need not decompress itself, which under emulation takes longer than all the rest of the boot.
// The header is described in the kernel's Documentation/x86/boot.rst.
func extractKernel(ctx context.Context, bzImage, elf string) error {
	b, err := os.ReadFile(bzImage)
	if err != nil {
		return err
	}
	if len(b) < 0x250 || string(b[0x202:0x206]) != "HdrS" {
		return errors.New("not a bzImage")
	}
	start := (int(b[0x1f1])+1)*512 + int(binary.LittleEndian.Uint32(b[0x248:]))
	end := start + int(binary.LittleEndian.Uint32(b[0x24c:]))
	if start+8 > end || end > len(b) {
		return errors.New("the header of the bzImage is damaged")
	}
	payload := b[start:end]
	var cmd *exec.Cmd
	switch { // all but gzip have the unpacked size appended
	case bytes.HasPrefix(payload, []byte("\xfd7zXZ")):
		cmd = exec.CommandContext(ctx, "xz", "-dc", "--single-stream")
	case bytes.HasPrefix(payload, []byte("\x28\xb5\x2f\xfd")):
		cmd, payload = exec.CommandContext(ctx, "zstd", "-dc"), payload[:len(payload)-4]
	case bytes.HasPrefix(payload, []byte("\x1f\x8b")):
		cmd = exec.CommandContext(ctx, "gzip", "-dc")
	default:
		return fmt.Errorf("unknown compression (% x)", payload[:6])
	}
	cmd.Stdin = bytes.NewReader(payload)
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("%s: %w", strings.Join(cmd.Args, " "), err)
	}
	return os.WriteFile(elf, out, 0o644)
}

// ensureInitrd builds the initramfs: busybox, guest/init and the modules it takes to mount the
// host's root. Its name holds what it is made of, so another version of the lab gets its own.
func ensureInitrd(ctx context.Context, b base) (string, error) {
	script, err := guestFiles.ReadFile("guest/init")
	if err != nil {
		return "", err
	}
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	for _, part := range [][]byte{script, busybox, []byte(b.version)} {
		part := sha256.Sum256(part)
		sum.Write(part[:])
	}
	path := filepath.Join(b.cache, fmt.Sprintf("initrd-%x", sum.Sum(nil)[:8]))
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	var archive cpio
	for _, d := range []string{"bin", "dev", "host", "lab", "modules", "overlay", "proc", "root", "sys"} {
		archive.add(d, 0o40755, nil)
	}
	archive.add("bin/busybox", 0o100755, busybox)
	archive.add("init", 0o100755, script)
	seen := map[string]bool{}
	for _, root := range []string{"virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay"} {
		out, err := exec.CommandContext(ctx, "modprobe", "-d", b.kernel, "-S", b.version, "--show-depends", root).Output()
		if err != nil {
			return "", fmt.Errorf("modprobe --show-depends %s: %w", root, err)
		}
		for _, line := range strings.Split(string(out), "\n") {
			word, file, _ := strings.Cut(strings.TrimSpace(line), " ") // or "builtin NAME"
			if file = strings.TrimSpace(file); word != "insmod" || seen[file] {
				continue
			}
			seen[file] = true
			module, err := readModule(ctx, file)
			if err != nil {
				return "", err
			}
			name, _, _ := strings.Cut(filepath.Base(file), ".")
			archive.add(fmt.Sprintf("modules/%02d-%s.ko", len(seen), name), 0o100644, module)
		}
	}
	tmp, err := os.CreateTemp(b.cache, "initrd-tmp-")
	if err != nil {
		return "", err
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(archive.end())
	if err = errors.Join(err, tmp.Chmod(0o644), tmp.Close()); err != nil {
		return "", err
	}
	return path, os.Rename(tmp.Name(), path)
}

// readModule reads a kernel module, which some distributions compress.
func readModule(ctx context.Context, file string) ([]byte, error) {
	for suffix, tool := range map[string]string{".xz": "xz", ".zst": "zstd", ".gz": "gzip"} {
		if strings.HasSuffix(file, suffix) {
			out, err := exec.CommandContext(ctx, tool, "-dc", file).Output()
			if err != nil {
				return nil, fmt.Errorf("%s -dc %s: %w", tool, file, err)
			}
			return out, nil
		}
	}
	return os.ReadFile(file)
}

// cpio builds an archive in the "newc" format, as the kernel wants it.
type cpio struct {
	buf bytes.Buffer
	ino int
}

func (c *cpio) add(name string, mode int, data []byte) {
	c.ino++
	// Magic; inode, mode, uid, gid, nlink, mtime, size, 2 × device, 2 × node, length of name, check.
	fmt.Fprintf(&c.buf, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		c.ino, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0)
	c.buf.WriteString(name + "\x00")
	c.pad()
	c.buf.Write(data)
	c.pad()
}

func (c *cpio) pad() { c.buf.Write(make([]byte, -c.buf.Len()&3)) }

func (c *cpio) end() []byte {
	c.add("TRAILER!!!", 0, nil)
	return c.buf.Bytes()
}

// acceleration says whether guests run on KVM or are emulated. /dev/kvm may open and yet not run a
// guest, so the first time one is booted; the answer is kept for this kernel of the host.
func (b base) acceleration(ctx context.Context) (string, error) {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return "tcg", nil
	}
	_ = f.Close()
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return "", err
	}
	path := filepath.Join(b.cache, "accel-"+strings.TrimSpace(string(release)))
	if known, err := os.ReadFile(path); err == nil {
		return string(known), nil
	}
	accel := "tcg"
	trial, cancel := context.WithTimeout(ctx, kvmTrial)
	defer cancel()
	if vm, err := bootOnce(trial, b, vmConfig{accel: "kvm"}); err == nil {
		accel = "kvm"
		vm.stop()
	} else if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	return accel, os.WriteFile(path, []byte(accel), 0o644)
}

// kvmTrial is how long a guest may take to boot on KVM, where it takes two seconds, to be trusted.
const kvmTrial = 20 * time.Second
