# The formula of a tap. scripts/homebrew/formula writes VERSION and SHA256 into it for a release.
class Moeflux < Formula
  desc "Run Mixture-of-Experts language models larger than memory on MLX"
  homepage "https://pypi.org/project/moeflux-mlx/"
  url "https://files.pythonhosted.org/packages/source/m/moeflux-mlx/moeflux_mlx-VERSION.tar.gz"
  sha256 "SHA256"
  license "MIT"

  depends_on arch: :arm64
  depends_on macos: :sonoma # MLX's wheels need it
  depends_on "python@3.13"

  # MLX comes as PyPI's wheel, which has the kernels for every Apple GPU.
  def install
    python = Formula["python@3.13"].opt_bin/"python3.13"
    system python, "-m", "venv", libexec
    system libexec/"bin/pip", "install", "--only-binary", ":all:", "#{buildpath}[server,structured]"
    bin.install_symlink libexec/"bin/moeflux"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/moeflux --version")
    assert_match "moeflux launch", shell_output("#{bin}/moeflux launch --help")
  end
end
